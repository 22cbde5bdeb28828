from hypothesis import HealthCheck, settings

# Machines that run the tests may be busy: no test fails because it was slow once.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
