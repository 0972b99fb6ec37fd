"""The same requests through TokenRouter and through what people would use instead; see `perf.compare`."""
