"""Conversations to rows of token ids and loss masks: sources, rendering, answers, quality, splits.

Plain values go in and come out; how answers are generated is handed in (`answers.Answerer`).
"""
