# Nodes with torch and DeepSpeed, and the examples; a master, too, where `master.image` names no other image.
# Your own image: FROM this one, or these lines in yours.
# Build it in the root of a checkout: docker build -f deploy/docker/trainer.Dockerfile .
# TORCH names the build of PyTorch, TORCH_INDEX_URL the index that it alone comes from.
# A mirror of all of PyPI belongs into the base image, in its pip.conf or as ENV PIP_INDEX_URL: no build-arg sets it.
FROM python:3.11-slim
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX_URL=
# g++: DeepSpeed compiles its optimizers where they first run.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ ninja-build \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/dalsegno \
    && /opt/dalsegno/bin/pip install --no-cache-dir ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$TORCH"
COPY . /src
RUN /opt/dalsegno/bin/pip install --no-cache-dir -c /src/constraints.txt '/src[train,etcd,http]' \
    && cp -r /src/examples /opt/dalsegno/examples \
    && rm -rf /src
ENV PATH=/opt/dalsegno/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /opt/dalsegno
USER 1000:1000
