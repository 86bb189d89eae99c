# CPU image with DeepSpeed: `docker run --ipc=host -v "$PWD":/job IMAGE --nproc 6 train.py` (docs/hosts.md, Containers)
FROM python:3.11-slim

# One thread per worker is recycle run's own default; DeepSpeed would look for a GPU first.
ENV DS_ACCELERATOR=cpu \
    OMP_NUM_THREADS=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONUNBUFFERED=1

WORKDIR /opt/megatron-recycle
COPY setup.py pyproject.toml README.md LICENSE ./
COPY scripts/constraints.txt scripts/gpt_deepspeed.py scripts/
COPY megatron_recycle megatron_recycle

# torch first and from its CPU index, or its CUDA libraries come along.
RUN pip install --extra-index-url https://download.pytorch.org/whl/cpu -c scripts/constraints.txt \
        "$(grep '^torch==' scripts/constraints.txt)+cpu" \
    && pip install -c scripts/constraints.txt ".[deepspeed]" \
    && useradd --uid 1000 --create-home worker \
    && install -d -o 1000 /job

USER 1000
WORKDIR /job
ENTRYPOINT ["recycle", "run"]
CMD ["--help"]
