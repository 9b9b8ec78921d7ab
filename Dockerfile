# docker build --tag grpo-flows:0.1.0-cpu .
# docker build --tag grpo-flows:0.1.0-gpu --build-arg HARDWARE=gpu .
# docker run --rm --volume grpo:/storage grpo-flows:0.1.0-cpu grpo --help
#
# Docker's defaults refuse what the sandbox of `unit_tests` is made of. A run with that reward needs
#     docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined
#     podman run --security-opt unmask=ALL
# and, where the host has AppArmor, --security-opt apparmor=unconfined. --cap-drop=ALL may be given with them.
#
# Debian 12 has a Python that requirements/*.txt are compiled for. PyTorch brings CUDA with it: the host needs its driver
# and the NVIDIA container toolkit, the image nothing.
# For the same image again, give --build-arg BASE=debian@sha256:…: a tag moves with Debian's security updates.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

# bubblewrap is the sandbox of `unit_tests`. g++ and Python's headers: PyTorch, Triton and vLLM compile kernels while they
# run; libnuma1: vLLM's kernels for CPUs. tini passes signals on and reaps orphans.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        bubblewrap ca-certificates g++ libnuma1 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/*

# Numbers, so that Kubernetes can tell that this is not root. A volume at /storage must be writable for this user.
RUN groupadd --gid 1000 grpo \
    && useradd --uid 1000 --gid grpo --create-home grpo \
    && install --directory --owner grpo --group grpo /storage

ENV PATH=/venv/bin:$PATH \
    VIRTUAL_ENV=/venv \
    GRPO_STORAGE=/storage
WORKDIR /app

# A link or a folder with PyTorch's CPU wheels, where its own index cannot be reached.
ARG UV_FIND_LINKS
ARG HARDWARE=cpu
COPY requirements requirements
# Bytecode now: the user who runs this may not write it, and each process would compile all that it imports.
RUN python3 -m venv /venv \
    && pip install --no-cache-dir --quiet uv==0.13.9 \
    && case "$HARDWARE/$UV_FIND_LINKS" in cpu/) backend="--torch-backend cpu" ;; esac \
    && uv pip install --no-cache --no-deps --compile-bytecode $backend --requirements requirements/$HARDWARE.txt

COPY . .
# Scripts and configurations of the examples use ./storage.
RUN ln --symbolic /storage storage \
    && uv pip install --no-cache --no-deps --editable . \
    && python -m compileall -q flows grpo_core tasks

# Models of the hub are kept there, or each container would download them.
ENV HF_HOME=/storage/huggingface
USER 1000:1000
ENTRYPOINT ["tini", "--"]
CMD ["grpo", "--help"]
