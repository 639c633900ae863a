# Gateway, local engine, trainer and `draft init`: everything but SGLang.
# One image, because all of it needs PyTorch: the gateway reads draft versions, which are tensors. The layer of
# dependencies changes with requirements.lock alone; the last layer is Slipstream itself, below 2 MB.
ARG PYTHON=3.11.15

FROM python:${PYTHON}-slim AS package
WORKDIR /source
COPY deploy/build.lock deploy/
RUN pip install --no-cache-dir --require-hashes -r deploy/build.lock
COPY pyproject.toml README.md LICENSE ./
COPY speculator speculator
COPY serving serving
COPY trainer trainer
COPY slipstream slipstream
RUN pip install --no-cache-dir --no-deps --no-build-isolation --target /package .

FROM python:${PYTHON}-slim AS dependencies
WORKDIR /source
COPY requirements.lock .
RUN pip install --no-cache-dir --require-hashes --target /dependencies -r requirements.lock

FROM python:${PYTHON}-slim
# The number is the same in both images: they share the volume of drafts.
RUN groupadd --gid 10001 slipstream \
    && useradd --uid 10001 --gid 10001 --no-create-home slipstream \
    && install -d -o 10001 -g 10001 /models /store /state
COPY --from=dependencies /dependencies /opt/dependencies
COPY --from=package /package /opt/slipstream
ENV PYTHONPATH=/opt/slipstream:/opt/dependencies PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
ENTRYPOINT ["python", "-m", "slipstream"]
