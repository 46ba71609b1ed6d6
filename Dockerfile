# vLLM's own server with the plugin, run without root:
#   docker build -t reprieve-vllm .
#   docker run --gpus all -p 8000:8000 -v ./deploy/policy.json:/etc/reprieve/policy.json:ro reprieve-vllm \
#       --model TARGET --speculative-config '{...}' --additional-config '{"reprieve": "/etc/reprieve/policy.json"}'
# deploy/compose.yaml starts it with Prometheus and Grafana.
ARG VLLM=v0.32.0
FROM vllm/vllm-openai:${VLLM}
COPY pyproject.toml hatch_build.py README.md LICENSE NOTICE /opt/reprieve/
COPY src /opt/reprieve/src
# The image's torch and transformers stay as they are; the build fails if the plugin is not found.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN python3 -m pip freeze | grep -iE "^(torch|transformers|vllm)==" > /tmp/kept.txt \
    && python3 -m pip install --no-cache-dir -c /tmp/kept.txt /opt/reprieve \
    && python3 -c "from importlib.metadata import entry_points as e; import vllm; e(group='vllm.general_plugins')['reprieve'].load()"
# Newer vLLM images already have this user; its home folder holds the caches.
RUN { getent passwd 2000 || useradd --uid 2000 --gid 0 --home-dir /home/vllm vllm; } \
    && mkdir -p /home/vllm/.cache && chown -R 2000:0 /home/vllm && chmod -R g+rwX /home/vllm
ENV HOME=/home/vllm
WORKDIR /home/vllm
USER 2000:0
EXPOSE 8000
# Loading a model takes minutes. A 503 after that means that a worker does not apply the rule.
HEALTHCHECK --interval=30s --timeout=10s --start-period=15m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=8)"]
