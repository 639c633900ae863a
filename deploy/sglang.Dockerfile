# SGLang with the plugin, based on SGLang's own image, which has the CUDA toolkit and compiled kernels of its release.
# Only the plugin's further dependencies are added, at the versions of requirements-sglang.lock.
ARG SGLANG=0.5.23
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

FROM lmsysorg/sglang:v${SGLANG}
COPY deploy/sglang.lock /opt/
# The same user id as in the other image: they share the volume of drafts.
RUN python3 -m pip install --no-cache-dir --no-deps --require-hashes --target /opt/dependencies -r /opt/sglang.lock \
    && groupadd --gid 10001 slipstream \
    && useradd --uid 10001 --gid 10001 --create-home slipstream \
    && install -d -o 10001 -g 10001 /models /store
COPY --from=package /package /opt/slipstream
ENV PYTHONPATH=/opt/slipstream:/opt/dependencies PYTHONDONTWRITEBYTECODE=1
# Fail the build, not the service, where the base image lacks a module that the plugin needs.
RUN python3 -c "import serving.sglang.plugin.runtime, slipstream.start.sglang, slipstream.cli.main"
USER 10001:10001
ENTRYPOINT ["python3", "-m", "slipstream"]
