# Two images, with DeepSpeed, Megatron-Core and the quickstart in them (docs/hosts.md, Containers):
#
#   docker build -t recycle .                       CPU; small, for trying it out and for tests
#   docker build --target cuda -t recycle:cuda .    NVIDIA's PyTorch, with apex and its extensions
#   docker run --ipc=host -v "$PWD":/job recycle run --nproc 6 train.py
#   docker run --ipc=host recycle quickstart --output /tmp/quickstart

# The image of NGC that the CUDA target begins with: PyTorch 2.8, CUDA 13.0, Python 3.12, NCCL 2.27 (which shrinks).
ARG NGC=nvcr.io/nvidia/pytorch:25.08-py3@sha256:ace9a848c0ae543317e3c4763b6b4248961c47902625abfe3c77a0fb931c50fb
ARG PYTHON=python:3.11-slim

# ---- CUDA: apex of NVIDIA's repository (the program of that name on PyPI is another one), at its tag for this base
FROM ${NGC} AS apex
ARG APEX=e74a67bba3ee679f778670e17edc21639008ae0a
ARG TORCH_CUDA_ARCH_LIST="8.0 9.0 10.0"
ARG MAX_JOBS=16
WORKDIR /src/apex
RUN git init -q . \
    && git fetch -q --depth 1 https://github.com/NVIDIA/apex "${APEX}" \
    && git checkout -q FETCH_HEAD \
    && NVCC_APPEND_FLAGS="--threads 4" pip wheel --no-deps --no-build-isolation --no-cache-dir -w /wheels \
        --config-settings "--build-option=--cpp_ext" --config-settings "--build-option=--cuda_ext" .

FROM ${NGC} AS cuda
LABEL org.opencontainers.image.title="megatron-recycle (CUDA)" \
      org.opencontainers.image.description="Training that goes on when workers fail: DeepSpeed and Megatron-Core" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=apex /wheels /wheels
WORKDIR /opt/megatron-recycle
COPY setup.py pyproject.toml README.md LICENSE ./
COPY scripts/gpt_deepspeed.py scripts/pretrain_gpt_megatron.py scripts/quickstart.py scripts/jobs.py scripts/megatron_cpu.py scripts/
COPY scripts/slurm scripts/slurm
COPY megatron_recycle megatron_recycle
# The base's constraints keep its own torch: without them PyPI's would replace it. The imports need no GPU.
RUN pip install --no-cache-dir --no-deps --force-reinstall /wheels/*.whl \
    && pip install --no-cache-dir --constraint /etc/pip/constraint.txt ".[deepspeed,megatron,pictures]" \
    && rm -rf /wheels build ./*.egg-info \
    && python -c "import torch, amp_C, apex_C, fused_weight_gradient_mlp_cuda; from apex.optimizers import FusedAdam; \
import deepspeed, megatron.core, megatron_recycle; assert torch.version.cuda and '+cpu' not in torch.__version__" \
    && recycle --version
# What recovery over NCCL needs (megatron_recycle/nccl_settings.py says why): here too, for launchers that are not ours.
ENV TORCH_NCCL_ASYNC_ERROR_HANDLING=0 \
    TORCH_NCCL_ENABLE_MONITORING=0 \
    TORCH_NCCL_DUMP_ON_TIMEOUT=0 \
    TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=1 \
    TORCH_NCCL_RETHROW_CUDA_ERRORS=0 \
    TORCH_NCCL_PROPAGATE_ERROR=0 \
    NCCL_RUNTIME_CONNECT=0 \
    NCCL_NVLS_ENABLE=0 \
    CUDA_MODULE_LOADING=EAGER \
    DS_BUILD_OPS=0 \
    HOME=/tmp \
    PYTHONUNBUFFERED=1
RUN install -d -m 1777 /job
USER 1000
WORKDIR /job
HEALTHCHECK --interval=30s --timeout=15s --start-period=120s \
    CMD ["python", "-m", "megatron_recycle.launch.health"]
ENTRYPOINT ["recycle"]
CMD ["--help"]

# ---- CPU
FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY scripts/constraints.txt scripts/
RUN python -m venv /opt/venv \
    && /opt/venv/bin/pip install --extra-index-url https://download.pytorch.org/whl/cpu -c scripts/constraints.txt \
        "$(grep '^torch==' scripts/constraints.txt)+cpu"
COPY setup.py pyproject.toml README.md LICENSE ./
COPY scripts/gpt_deepspeed.py scripts/pretrain_gpt_megatron.py scripts/quickstart.py scripts/jobs.py scripts/megatron_cpu.py scripts/
COPY scripts/slurm scripts/slurm
COPY megatron_recycle megatron_recycle
# There is no compiler in the image: torch's headers and test programs, and packages' own tests, would be of no use.
RUN /opt/venv/bin/pip install -c scripts/constraints.txt ".[deepspeed,megatron,pictures]" \
    && /opt/venv/bin/pip uninstall -y pip \
    && (for part in include share test; do rm -rf /opt/venv/lib/python3*/site-packages/torch/$part; done) \
    && find /opt/venv \( -name __pycache__ -o -name tests \) -type d -prune -exec rm -rf {} +

FROM ${PYTHON} AS cpu
LABEL org.opencontainers.image.title="megatron-recycle (CPU)" \
      org.opencontainers.image.description="Training that goes on when workers fail: DeepSpeed and Megatron-Core" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/venv /opt/venv
COPY LICENSE README.md /opt/megatron-recycle/
# One thread per worker is recycle run's own default; DeepSpeed would look for a GPU first. HOME is for any user
# (docker run --user).
ENV PATH=/opt/venv/bin:$PATH \
    DS_ACCELERATOR=cpu \
    HOME=/tmp \
    OMP_NUM_THREADS=1 \
    PYTHONUNBUFFERED=1
RUN install -d -m 1777 /job \
    && python -c "import torch, deepspeed, megatron.core, megatron_recycle" \
    && recycle --version
USER 1000
WORKDIR /job
HEALTHCHECK --interval=30s --timeout=15s --start-period=60s \
    CMD ["python", "-m", "megatron_recycle.launch.health"]
ENTRYPOINT ["recycle"]
CMD ["--help"]
