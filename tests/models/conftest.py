import pytest
import torch


@pytest.fixture(autouse=True)
def seed():
    """The same weights whatever ran before: tolerances of bfloat16 leave no room for odd draws."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_thread():
    """Small models run fastest on one thread, especially when tests run in parallel."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
