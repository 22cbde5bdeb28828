import os

# Several tests run at once, on as many cores: threads that wait for each other would only spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

# Machines that run the tests may be busy: no test fails because it was slow once.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
