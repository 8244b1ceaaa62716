"""Policy versions on their way to engines: payload, folder, publisher machine and transports."""
