# SGLang serving the current release. Mount the target at /target and releases/<name>/draft at /draft, both read-only.
# The version is that of stages/engines/sglang.py: a newer server numbers layers and reports figures as it likes, so
# raise it only together with a run of gate-deployment.
ARG SGLANG_VERSION=v0.5.23
FROM lmsysorg/sglang:${SGLANG_VERSION}

# SGLang finds the plug-in by its entry point: a draft that is not the one gate-deployment judged does not start. No source
# file of SGLang is touched; the build fails when the plug-in is not found or its hook has no place any more.
COPY sglang_guard /opt/sglang_guard
RUN pip install --no-cache-dir --no-deps /opt/sglang_guard && python3 -m draftline_sglang_guard

RUN useradd --uid 10001 --create-home line
# by number, so that an orchestrator that demands another user than root can see it
USER 10001
ENV HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 DRAFT_STEPS=3
EXPOSE 30000
HEALTHCHECK --interval=30s --timeout=5s --start-period=600s \
 CMD ["curl", "-fsS", "http://127.0.0.1:30000/health"]
# A chain (topk 1) proposes DRAFT_STEPS tokens and verifies one more.
CMD ["sh", "-c", "exec python3 -m sglang.launch_server --host 0.0.0.0 --port 30000 --model-path /target \
    --speculative-algorithm EAGLE3 --speculative-draft-model-path /draft \
    --speculative-num-steps $DRAFT_STEPS --speculative-eagle-topk 1 \
    --speculative-num-draft-tokens $((DRAFT_STEPS + 1)) --enable-metrics"]
