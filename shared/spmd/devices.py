"""Virtual devices: one process on one CPU that runs a JAX program for many devices."""


def virtual_devices(count: int) -> list:
    """Make JAX treat this machine's CPU as `count` devices, and return them.

    Raises:
        RuntimeError: If JAX has already started with another number of devices.
    """
    import jax  # Importing it takes a second, and most of the course does without it.

    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        message = f"JAX has already started with {jax.device_count()} devices: restart the kernel to get {count}"
        raise RuntimeError(message) from None
    return jax.devices()
