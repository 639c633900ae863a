"""What `slipstream doctor` looks at, one subject a file. A check yields findings and may raise SlipstreamError."""
