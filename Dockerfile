# vLLM's own server with the plugin in it:
#   docker build -t vllm-reprieve .
#   docker run --gpus all -p 8000:8000 vllm-reprieve --model TARGET --speculative-config '{...}' \
#       --additional-config '{"reprieve": "margin:delta=2"}'
ARG VLLM=v0.32.0
FROM vllm/vllm-openai:${VLLM}
COPY pyproject.toml README.md LICENSE NOTICE /opt/reprieve/
COPY src /opt/reprieve/src
# The image's torch and transformers stay as they are; the build fails if the plugin is not found.
RUN python3 -m pip freeze | grep -iE "^(torch|transformers|vllm)==" > /tmp/kept.txt \
    && python3 -m pip install --no-cache-dir -c /tmp/kept.txt /opt/reprieve \
    && python3 -c "from importlib.metadata import entry_points as e; import vllm; e(group='vllm.general_plugins')['reprieve'].load()"
