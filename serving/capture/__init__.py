"""From a finished generation to the trace stream: what is kept, filtered, recorded and erased."""
