"""Whatever crosses a file boundary: params, capture points, manifests, reports, evidence, draft and release records.

Nothing here imports torch, Great Expectations or another room of the house.
"""
