import io
import json
import logging
import os
import sys
import types
import unittest
from pathlib import Path

import pytest
from _pytest._io import TerminalWriter
from _pytest.junitxml import xml_key

from torch_testing_ext import pytest_plugin
from torch_testing_ext._pytest_ranks.pytest_internals import (
    captured_output,
    collected_files,
    configuration,
    failure_texts,
    item_fixtures,
    item_state,
)


@pytest.fixture
def value():
    return 3


@pytest.fixture
def later():
    return 4


@pytest.mark.parametrize("number", [1])
def test_fixtures(request, value, number, later):
    definitions = item_fixtures.fixture_definitions(request.node)
    assert [each.func.__name__ for each in definitions["value"]] == ["value"]
    assert item_fixtures.is_parameter(definitions["number"][0]) and not item_fixtures.is_parameter(
        definitions["value"][0]
    )
    del request.node.funcargs["later"]
    item_fixtures.fill_fixtures(request.node)
    assert request.node.funcargs["later"] == 4
    assert item_fixtures.is_fixture(value_function()) == (pytest.version_tuple < (8, 4))


def test_fixtures_of_a_module():
    renamed = pytest.fixture(name="other")(lambda: 5)
    module = {"value": value, "test": test_fixtures, "renamed": renamed, "later": later}
    assert item_fixtures.fixtures_of(module) == ["value", "other", "later"]
    assert {"dist_env", "layout", "spawn"} <= {*item_fixtures.fixtures_of(vars(pytest_plugin))}


def value_function():
    @pytest.fixture
    def function(): ...

    return function


def test_added_fixtures(request):
    holder = types.ModuleType("added")
    holder.added = pytest.fixture(name="added")(lambda: 5)
    item_fixtures.add_fixtures(request.node.parent, holder)
    assert request.getfixturevalue("added") == 5


ended = []


def test_finalizers(request):
    item_fixtures.finalizers(request.node).append(lambda: ended.append("by a finalizer"))


def test_finalizers_were_called():
    assert ended == ["by a finalizer"]


class XunitTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls): ...

    @pytest.fixture(autouse=True)
    def keep(self, request):
        self.item = request.node

    def test_unittest(self):
        assert item_state.is_of_unittest(self.item) and item_state.kept_errors(self.item) == []
        names = list(item_fixtures.fixture_definitions(self.item))
        assert any(name.startswith(item_fixtures.UNITTEST_FIXTURE) for name in names)
        try:
            raise ValueError("kept")
        except ValueError:
            self.item.addError(self, sys.exc_info())
        assert [str(error) for error in item_state.kept_errors(self.item)] == ["kept"]
        self.item._excinfo.clear()
        self.item._explicit_tearDown = "postponed"
        assert item_state.postponed_tear_down(self.item) == "postponed"
        self.item._explicit_tearDown = None


class TestXunit:
    def setup_method(self): ...

    def test_of_pytest(self, request):
        assert not item_state.is_of_unittest(request.node) and item_state.kept_errors(request.node) == []
        assert item_fixtures.argument_names(request.node)[:1] == ("request",)
        assert item_state.postponed_tear_down(request.node) is None
        assert any(
            name.startswith(item_fixtures.XUNIT_FIXTURES) for name in item_fixtures.fixture_definitions(request.node)
        )


def test_options():
    known = configuration.known_options()
    assert {"-k", "--tb", "--basetemp", "--sanitize"} <= known.keys() and "--nosuch" not in known
    assert known["--tb"] and known["-p"] and not known["--setup-show"] and not known["-v"]
    config = configuration.make_config(["-q", "-m", "not slow", "--tb=short", __file__], [])
    assert configuration.options_again(config) == ["-m", "not slow"]
    configuration.unconfigure(config)


def test_xfail(request):
    assert not item_state.is_marked_xfail(request.node)
    request.applymarker(pytest.mark.xfail(reason="added"))
    item_state.read_xfail_marks(request.node)
    assert item_state.is_marked_xfail(request.node)
    assert False


def test_reports(request):
    raise item_state.skip_at_test("at the test")


def fails():
    assert value is None


def test_texts(request):
    report = pytest.TestReport.from_item_and_call(request.node, pytest.CallInfo.from_call(fails, "call"))
    text = failure_texts.text_of(report)
    assert text.startswith("    def fails") and text.strip() == report.longreprtext
    report.longrepr = failure_texts.plain_text("the text", "path.py", 3, "the summary")
    assert report.longreprtext.startswith("the text") and report.longrepr.reprcrash.message == "the summary"


def test_property_of_the_run(pytestconfig):
    configuration.add_property(
        pytestconfig, "name", "value"
    )  # no JUnit file is written, so there is nothing to add it to
    written = types.SimpleNamespace(add_global_property=lambda *named: properties.append(named))
    properties = []
    pytestconfig.stash[xml_key] = written
    configuration.add_property(pytestconfig, "name", "value")
    del pytestconfig.stash[xml_key]
    assert properties == [("name", "value")]


def test_colours(request, monkeypatch):
    report = pytest.TestReport.from_item_and_call(request.node, pytest.CallInfo.from_call(fails, "call"))
    told = "title\n  Expected: 1\n  Got:      2\n\nrun again:  this"
    report.longrepr = failure_texts.plain_text(told, "path.py", 3, "the summary")
    report.line_styles = ["bold", "green", "red", "", "light"]
    sent = report._to_json()
    failure_texts.colour(report)
    assert report._to_json() == sent and failure_texts.text_of(report) == told
    writer = TerminalWriter(io.StringIO())
    writer.hasmarkup = True
    report.toterminal(writer)
    lines = writer._file.getvalue().splitlines()
    assert lines[:3] == ["\x1b[1mtitle\x1b[0m", "\x1b[32m  Expected: 1\x1b[0m", "\x1b[31m  Got:      2\x1b[0m"]


def test_failure_text(request):
    """The frame of a library is one line of its source."""
    try:
        json.loads("[")
    except ValueError as error:
        text = failure_texts.failure_text(request.node, error)
    assert '>           json.loads("[")' in text.splitlines(), "the whole function of the project"
    assert "def raw_decode(" not in text
    assert "json.decoder.JSONDecodeError: Expecting value" in text
    assert text.splitlines().count('    raise JSONDecodeError("Expecting value", s, err.value) from None') == 1


def test_settings(request):
    unknown, known = configuration.settings(request.config)
    assert "no_such" not in known and "testpaths" in known and "no_such" not in unknown


def test_debugger(request, monkeypatch):
    monkeypatch.setattr("pdb.Pdb.interaction", lambda *_: None)
    excinfo = call = None
    try:
        1 / 0
    except ZeroDivisionError as error:
        excinfo = failure_texts.exception_info(error)
    call = pytest.CallInfo.from_call(lambda: 1 / 0, "call")
    failure_texts.enter_debugger(request.node, excinfo, pytest.TestReport.from_item_and_call(request.node, call))


def test_output(request, tmp_path):
    assert tmp_path.is_relative_to(configuration.temporary_base(request.config))
    manager = captured_output.capture_manager(request.config)
    assert manager.is_globally_capturing()
    print("captured")
    assert "captured" in manager.read_global_capture()[0]
    of_terminal, of_report = captured_output.log_handlers(request.config)
    of_report.setStream(stream := io.StringIO())
    logging.error("logged")
    assert "logged" in stream.getvalue()
    captured_output.remove_log_handler(of_terminal)
    assert of_terminal not in logging.getLogger().handlers
    with captured_output.logging_to(logging.StreamHandler(stream)):
        logging.error("logged twice")
    assert stream.getvalue().count("logged twice") == 2
    captured_output.begin_caplog(request.node, request.node)
    assert request.getfixturevalue("caplog").messages == []
    assert captured_output.live_log(request.config) is captured_output.live_terminal(request.config) is None
    request.config.option.setupshow = True
    os.close(captured_output.live_terminal(request.config))
    request.config.option.setupshow = False
    request.config.option.log_cli_level = "WARNING"
    assert captured_output.live_log(request.config)[1] is not None
    request.config.option.log_cli_level = None
    for name in [configuration.TERMINAL]:
        assert request.config.pluginmanager.get_plugin(name) is not None
    if (pid := os.fork()) == 0:
        captured_output.forget_captured(request.config)
        os._exit("_global_capturing=None" not in repr(manager))
    assert os.waitpid(pid, 0)[1] == 0


def test_shared_set_up(request):
    session = request.session
    other = next(item for item in session.items if "value" in item.fixturenames)
    if (pid := os.fork()) == 0:
        try:
            assert item_fixtures.take_finalizers(request.node) and not item_fixtures.take_finalizers(request.node)
            item_fixtures.take_over(session, "module", ("value",))
            assert item_fixtures.fixture_definitions(other)["value"][0].scope == "module"
            item_fixtures.set_up_in_session(other)
            assert other.funcargs["value"] == 3 and item_fixtures.finalizers(other)
            item_fixtures.tear_down_session(session)
            assert not item_fixtures.take_finalizers(other)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def test_sessions(tmp_path):
    words = ["--capture=no", "-c", os.devnull, f"--rootdir={tmp_path}", "--pdb", "--trace", "--lf"]
    words += ["--nf", "--sw"]
    config = configuration.make_config([*words, str(tmp_path)], [])
    for name in (failure_texts.DEBUGGER, failure_texts.TRACE, configuration.TERMINAL, *configuration.REMEMBERING):
        assert config.pluginmanager.get_plugin(name) is not None, name
    captured_output.redirect_terminal(config, stream := io.StringIO()).write_line("written")
    assert "written" in stream.getvalue()
    path = tmp_path / "test_of_session.py"
    path.write_text("def test_a(): ...")
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    module = pytest.Module.from_parent(session, path=path)
    assert collected_files.imported_module(module) is None
    assert module.obj is collected_files.imported_module(module)

    class Noting:
        def pytest_sessionfinish(self, exitstatus):
            finished.append(int(exitstatus))

    finished, session.exitstatus = [], pytest.ExitCode.TESTS_FAILED
    config.pluginmanager.register(Noting())
    configuration.finish_without_tear_down(session)
    assert finished == [1]
    assert config.pluginmanager.get_plugin("runner") is not None
    configuration.unconfigure(config)
    Path(tmp_path, "conftest.py").write_text("1 / 0")
    with pytest.raises(Exception) as raised:
        configuration.make_config([*words, str(tmp_path)], [])
    file, cause = configuration.failed_conftest(raised.value)
    assert (file.name, type(cause)) == ("conftest.py", ZeroDivisionError)
    assert configuration.failed_conftest(ValueError()) is None


def test_odd_folders(tmp_path):
    path = tmp_path / "[a::b]" / "test_[x].py"
    path.parent.mkdir()
    path.write_text("class TestA:\n    def test_a(self): ...\n    def test_b(self): ...\n")
    words = ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}"]
    with collected_files.whole_paths():
        config = configuration.make_config([*words, f"{path}::TestA::test_b"], [])
        session = pytest.Session.from_config(config)
        config.hook.pytest_sessionstart(session=session)
        session.perform_collect()
    (item,) = session.items
    assert item_state.name_in_file(item) == "TestA::test_b"
    collectors = [collector for collector in item.listchain() if collected_files.is_file(collector)]
    assert [collector.path for collector in collectors] == [path]
    configuration.unconfigure(config)


def test_ways_to_a_file(tmp_path):
    package, beside = tmp_path / "package", tmp_path / "beside"
    for folder in (package, beside):
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / "test_x.py").write_text("def test_x(): ...")
    looked_at = []

    class Narrowed:
        def pytest_ignore_collect(self, collection_path):
            looked_at.append(collection_path)
            return None if collected_files.leads_to(collection_path, package / "test_x.py") else True

    words = ["-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tmp_path}"]
    config = configuration.make_config([*words, str(tmp_path)], [Narrowed()])
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    session.perform_collect()
    assert [item.path for item in session.items] == [package / "test_x.py"]
    assert any(beside in (path, *path.parents) for path in looked_at)
    (collector,) = [each for each in session.items[0].listchain() if collected_files.is_file(each)]
    assert collector.path == package / "test_x.py"
    configuration.unconfigure(config)
