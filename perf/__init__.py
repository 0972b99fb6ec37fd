"""Benchmarks and studies; nothing here is needed to serve, and `tools` never imports it.

a server       `emulated.deployment.EmulatedDeployment(...).serve()`, `tools.tritonserver.server.TritonServer(folder)`
a closed loop  `tools.load.ClosedLoop`, over HTTP `load.event_loop.EventLoop`; what its users feel: `load.timing`; what
               the server did: `serving.window`
its stalls     `stall.prober.Prober` beside whatever else happens
known answers  `load.known`, asked for over every way in by `load.known_loop.KnownLoop`; `fuzz` and `chaos` beside them
results        `rows` (CSV, tables on the screen), `tools.markdown`, `figure` (plots); they lie in results/
a command      `command.run(main)`: typer, options with several values, refusals in one line
"""
