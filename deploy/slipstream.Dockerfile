# Gateway, local engine, trainer and `drafts init`: everything but SGLang.
# One image, because all of them need PyTorch: the gateway, too, reads draft versions, which are tensors. The dependency
# layer changes only with requirements.lock; the last layer is Slipstream itself, below 2 MB.
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
# PyPI has PyTorch for Linux only with CUDA, and it does not start without most of CUDA's libraries. WITHOUT_GPU removes
# the ones that are loaded only on a GPU.
ARG WITHOUT_GPU=
RUN pip install --no-cache-dir --require-hashes --target /dependencies -r requirements.lock \
    && if [ -n "$WITHOUT_GPU" ]; then \
      rm -r /dependencies/triton /dependencies/nvidia/cudnn/lib/libcudnn_* /dependencies/nvidia/cu13/lib/libcusolver*; \
    fi

# Compile our CPU kernels for both instruction sets: the final image has no compiler, and its /tmp is mounted noexec.
FROM dependencies AS kernels
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++
COPY --from=package /package /opt/slipstream
ENV PYTHONPATH=/opt/slipstream:/dependencies PYTHONDONTWRITEBYTECODE=1
RUN python -m serving.local.kernels.build

FROM python:${PYTHON}-slim
# The same user id as in the other image: they share the volume of drafts.
RUN groupadd --gid 10001 slipstream \
    && useradd --uid 10001 --gid 10001 --no-create-home slipstream \
    && install -d -o 10001 -g 10001 /models /store /state
COPY --from=dependencies /dependencies /opt/dependencies
COPY --from=kernels /opt/slipstream /opt/slipstream
ENV PYTHONPATH=/opt/slipstream:/opt/dependencies PYTHONDONTWRITEBYTECODE=1
# Fail the build, not the service, where a module is missing.
RUN python -c "import serving.local.engine, trainer.process, slipstream.cli.main"
USER 10001:10001
ENTRYPOINT ["python", "-m", "slipstream"]
