# sglang-router, which spreads requests over engines (deploy/kubernetes). It needs no SGLang, PyTorch or Slipstream.
ARG PYTHON=3.11.15

FROM python:${PYTHON}-slim AS dependencies
WORKDIR /source
COPY deploy/router.lock deploy/
RUN pip install --no-cache-dir --require-hashes --target /dependencies -r deploy/router.lock

FROM python:${PYTHON}-slim
RUN groupadd --gid 10001 slipstream \
    && useradd --uid 10001 --gid 10001 --no-create-home slipstream
COPY --from=dependencies /dependencies /opt/dependencies
ENV PYTHONPATH=/opt/dependencies PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
ENTRYPOINT ["python", "-m", "sglang_router.launch_router"]
