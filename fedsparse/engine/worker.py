"""The Ray actor that runs clients. Ray gets this class by value, so nothing of fedsparse is imported before `setup`."""

from typing import Any


class Worker:
    """One process that runs clients, one after the other.

    Calls arrive in the order in which the server made them: `setup`, then arrays before the batches that use them.
    """

    def setup(self, place: dict[str, Any], settings: bytes) -> str | None:
        """Get ready; return what is wrong with the user's ClientApp, or None.

        Parameters
        ----------
        place : dict
            ``path`` and ``cwd`` of the server's process, ``threads`` for numerical libraries, ``gpu`` whether this
            worker has a share of one, ``verbose``, ``shared`` paths that it must see.
        settings : bytes
            The cloudpickled arguments of `Runner`, the client app as the user named it.
        """
        import logging
        import os
        import signal
        import sys

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.path[:] = place["path"] + [entry for entry in sys.path if entry not in place["path"]]
        if os.path.isdir(place["cwd"]):
            os.chdir(place["cwd"])
        for path in place["shared"]:
            if not os.path.exists(path):
                return (
                    f"node {os.uname().nodename} does not see {path}: the clients' error memories must lie on a disk "
                    "that all nodes of the cluster share. Choose a folder there with --out."
                )
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[name] = str(place["threads"])
        if not place["gpu"]:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        if place["verbose"]:
            logging.basicConfig(level=logging.INFO)
            logging.getLogger("fedsparse").setLevel(logging.DEBUG)

        import pickle

        from fedsparse.engine.apps import load_client_app
        from fedsparse.engine.runner import Runner
        from fedsparse.errors import ConfigError

        try:
            try:
                spec, *rest = pickle.loads(settings)
            except Exception as error:
                raise ConfigError(
                    f"the client app cannot be rebuilt in a worker ({type(error).__name__}: {error}); name it as "
                    "'package.module:attribute' instead."
                ) from error
            self.runner = Runner(load_client_app(spec), *rest)
        except ConfigError as error:
            return str(error)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(place["threads"])
        self.arrays: dict[int, Any] = {}
        return None

    def load(self, key: int, packed: Any, keep: list[int]) -> None:
        """Take arrays that many messages share; forget all but those in `keep`."""
        from fedsparse.engine.transport import lease_arrays

        self.arrays = {old: self.arrays[old] for old in keep if old in self.arrays}
        self.arrays[key] = lease_arrays(packed)

    def run(self, batch: list[Any]) -> tuple[float, list[Any]]:
        """Answer a batch of jobs; return the seconds it took and the outcomes."""
        import time

        start = time.perf_counter()
        outcomes = self.runner.run(batch, self.arrays.__getitem__)
        return time.perf_counter() - start, outcomes
