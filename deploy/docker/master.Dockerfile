# The master alone: no torch. Build it in the root of a checkout: docker build -f deploy/docker/master.Dockerfile .
FROM python:3.11-slim AS build
COPY . /src
RUN python -m venv /opt/dalsegno \
    && /opt/dalsegno/bin/pip install --no-cache-dir -c /src/constraints.txt '/src[etcd,http]'

FROM python:3.11-slim
COPY --from=build /opt/dalsegno /opt/dalsegno
ENV PATH=/opt/dalsegno/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 1000:1000
ENTRYPOINT ["dlrover-master"]
