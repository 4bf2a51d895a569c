"""The options of replicas: on the command line, and in a config of Ray Serve."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import foretell.cli.serve as command
from command import expect_error, tiny_target
from foretell.cli.serve_ray import read_plan

CONFIG = Path(__file__).parents[2] / "deploy" / "ray-serve.yaml"


@pytest.fixture
def with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Ray was installed; nothing here runs it."""
    monkeypatch.setattr(command, "find_spec", lambda name: find_spec("json" if name == "ray" else name))


def test_replicas_need_ray() -> None:
    assert "--replicas 2 needs --ray" in expect_error("serve", "--replicas", "2", "--model", tiny_target())
    assert "greater than or equal to 1" in expect_error("serve", "--ray", "--replicas", "0", status=2)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_error_says_what_to_install() -> None:
    assert "pip install 'foretell[ray]'" in expect_error("serve", "--ray", "--model", tiny_target())


@pytest.mark.usefixtures("with_ray")
def test_what_is_wrong_is_told_before_ray_is_started() -> None:
    assert "threads must lie between" in expect_error("serve", "--ray", "--threads", "1000", "--model", tiny_target())
    assert "did you mean 'smollm2-135m'" in expect_error("serve", "--ray", "--model", "smolm2-135m")


@pytest.mark.usefixtures("with_ray")
def test_the_args_of_a_config_are_the_options_of_the_command_line() -> None:
    plan = read_plan(
        {
            "model": str(tiny_target()), "replicas": 3, "max-num-seqs": 4, "served-model-name": ["a", "b"],
            "enable-prefix-caching": False, "log-requests": True, "allowed-hosts": "name",
        }
    )  # fmt: skip
    assert plan.replicas == 3 and plan.settings.limits.max_num_seqs == plan.served.engine.rows == 4
    assert plan.settings.served_names == ("a", "b") and plan.settings.log_requests
    assert not plan.served.engine.prefix_caching and plan.settings.allowed_hosts == ("name",)
    # The address is that of Ray's proxy, so that any name may mean it.
    assert read_plan({}).settings.allowed_hosts is None and read_plan({}).replicas == command.DEFAULT_REPLICAS


@pytest.mark.usefixtures("with_ray")
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("port", 80, "port cannot be set there"),
        ("bogus", 1, "No such option: --bogus"),
        ("replicas", 0, "'--replicas': Input should be greater than or equal to 1"),
        ("max-num-seqs", "many", "'--max-num-seqs': Input should be a valid integer"),
        ("method", "sufix", "did you mean 'suffix'"),
    ],
)
def test_wrong_args_of_a_config_are_one_sentence(name: str, value: object, told: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_plan({name: value})
    assert told in str(caught.value)


@pytest.mark.usefixtures("with_ray")
def test_the_config_that_is_deployed_is_valid() -> None:
    (application,) = yaml.safe_load(CONFIG.read_text())["applications"]
    assert application["import_path"] == "foretell.cli.serve_ray:application"
    assert read_plan(application["args"]).replicas == 2
