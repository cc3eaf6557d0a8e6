"""What rules say, compared with the plainest reading of them; and what a file of them may not say."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_sidecar.security.rules import Action, Rule, Rules, RulesFile, read_rules
from seqdedupe.core.name_table import Pattern, joined
from seqdedupe.errors import ConfigurationError

SUBJECTS = ["ann", "bob", "a*", "x/y"]
NAMESPACES = ["t/n", "t/m", "u/n"]
TOPICS = [f"persistent://{namespace}/{name}" for namespace in NAMESPACES for name in ("a", "ann", "b")]
TOPIC_PATTERNS = [
    *TOPICS, "*", "**", "persistent://t/**", "persistent://t/n/*", "persistent://*/n/a", "persistent://t/n/${sub}",
    "persistent://${sub}/**", "persistent://t/*", "persistent://t/n/a*",
]  # fmt: skip
PRODUCERS = ["ann", "ann-1", "bob-1", "*-1"]

RULES = st.builds(
    Rule,
    name=st.just("r"),
    denies=st.booleans(),
    subjects=st.lists(st.sampled_from([*SUBJECTS, "*", "a*", "b*", "x/*"]), min_size=1, max_size=2).map(tuple),
    actions=st.frozensets(st.sampled_from([Action.PUBLISH, Action.OBSERVE]), min_size=1),
    topics=st.lists(st.sampled_from(TOPIC_PATTERNS), min_size=1, max_size=2).map(tuple),
    producers=st.sampled_from([("*",), ("${sub}-*",), ("ann", "${sub}"), ("**",)]),
)


def naive(rules: list[Rule], subject: str, action: Action, topic: str, producer: str) -> bool:
    """Deny by default, a denial wins."""
    words = {"sub": subject}

    def is_about(rule: Rule) -> bool:
        topics = [text for text in rule.topics if "${sub}" not in text or "/" not in subject]
        return (
            action in rule.actions
            and any(Pattern(text).matches(subject.encode()) for text in rule.subjects)
            and any(Pattern(text, words).matches(topic.encode()) for text in topics)
            and any(Pattern(text, words).matches(producer.encode()) for text in rule.producers)
        )

    about = [rule for rule in rules if is_about(rule)]
    return bool(about) and not any(rule.denies for rule in about)


@given(rules=st.lists(RULES, max_size=5), subject=st.sampled_from(SUBJECTS), topic=st.sampled_from(TOPICS))
def test_they_say_of_each_name_what_a_plain_reading_says(rules: list[Rule], subject: str, topic: str) -> None:
    wanted = [naive(rules, subject, Action.PUBLISH, topic, name) for name in PRODUCERS]
    judge = Rules(rules)
    assert [judge.decide(subject, Action.PUBLISH, topic, name).is_allowed for name in PRODUCERS] == wanted
    allowed = judge.on(subject, Action.PUBLISH, topic).are_allowed(*joined([name.encode() for name in PRODUCERS]))
    assert allowed.view(bool).tolist() == wanted
    if any(wanted):
        assert judge.decide(subject, Action.PUBLISH, topic).is_allowed
    # A partition is judged as its topic.
    of_partition = judge.decide(subject, Action.PUBLISH, f"{topic}-partition-3", PRODUCERS[0]).is_allowed
    assert of_partition == wanted[0]


@pytest.mark.parametrize(
    ("allowed", "denied", "is_allowed"),
    [
        ("orders", "", False),
        ("orders*", "", True),
        ("*", "", True),
        ("orders-partition-7", "", True),
        ("*", "orders", False),
        ("*", "orders-partition-7", False),
        ("*", "orders-partition-8", True),
    ],
)
def test_a_topic_named_as_a_partition_is_created_by_that_very_name(
    tmp_path: Path, allowed: str, denied: str, is_allowed: bool
) -> None:
    kinds = {"allow": allowed, "deny": denied}
    path = tmp_path / "rules.toml"
    path.write_text(
        "\n".join(
            f'[[{kind}]]\nsubjects = ["a"]\nactions = ["create"]\ntopics = ["{topic}"]\n'
            for kind, topic in kinds.items()
            if topic
        )
    )
    rules, name = read_rules(path).rules, "persistent://public/default/orders-partition-7"
    assert rules.decide("a", Action.CREATE, name).is_allowed == is_allowed
    # As a partition of its topic it counts for the caller's share all the same.
    assert rules.may_have_created("a", [name])[0] == (is_allowed or not denied)


@given(rules=st.lists(RULES, max_size=5), subject=st.sampled_from(SUBJECTS), namespace=st.sampled_from(NAMESPACES))
def test_a_whole_is_allowed_only_where_each_of_its_topics_is(rules: list[Rule], subject: str, namespace: str) -> None:
    rules = [Rule(r.name, r.denies, r.subjects, r.actions, r.topics) for r in rules]
    judge = Rules(rules)
    others = [*TOPICS, *(f"persistent://{one}/{name}" for one in (*NAMESPACES, "z/z") for name in ("other", "x-1"))]
    allowed = {topic: naive(rules, subject, Action.OBSERVE, topic, "p") for topic in others}
    if judge.decide_everything(subject, Action.OBSERVE).is_allowed:
        assert all(allowed.values())
    if judge.decide_namespace(subject, Action.OBSERVE, namespace).is_allowed:
        assert all(is_allowed for topic, is_allowed in allowed.items() if f"//{namespace}/" in topic)
    if any(allowed.values()):
        assert judge.decide_anything(subject, Action.OBSERVE).is_allowed


def _read(folder: Path, text: str) -> RulesFile:
    (folder / "rules.toml").write_text(text)
    return read_rules(folder / "rules.toml")


RULE = '[[allow]]\nsubjects = ["a"]\nactions = ["publish"]\ntopics = ["t"]\n'


def test_a_file_says_what_it_says(tmp_path: Path) -> None:
    file = _read(
        tmp_path,
        """
[[allow]]
subjects = ["shop-*"]
actions = ["publish", "create"]
topics = ["orders"]

[[allow]]
name = "own names"
subjects = ["shop-*"]
actions = ["publish"]
topics = ["carts-*"]
producers = ["${sub}", "${sub}/*"]

[[deny]]
subjects = ["shop-9"]
actions = ["publish"]
topics = ["*"]

[[share]]
subjects = ["shop-*"]
streams = 10

[all]
bytes_per_second = 1_000_000
""",
    )
    orders, carts = "persistent://public/default/orders", "persistent://public/default/carts-1"
    decide = file.rules.decide
    assert decide("shop-1", Action.CREATE, orders).is_allowed
    assert decide("shop-1", Action.PUBLISH, carts, "shop-1/till").is_allowed
    assert not decide("shop-1", Action.PUBLISH, carts, "shop-2/till").is_allowed
    named = decide("shop-1", Action.PUBLISH, carts, "shop-1").rule
    assert named is not None
    assert named.name == "own names"
    denial = decide("shop-9", Action.PUBLISH, orders, "p").rule
    assert denial is not None
    assert denial.name == "deny 1 (line 14)"
    assert (file.shares[0].limits.streams, file.in_all.bytes_per_second) == (10, 1_000_000)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RULE.replace('"publish"', '"publsh"'), "allow 1 (line 1): actions has 'publsh'"),
        (
            RULE + "\n# a comment\n" + RULE.replace("subjects", "subject"),
            "allow 2 (line 7): 'subject' is no key of this table",
        ),
        (RULE.replace('["a"]', '"a"'), "a list of texts is needed"),
        (RULE.replace('["a"]', "[]"), "a list of texts is needed"),
        (RULE.replace('["a"]', '["${sub}"]'), "${sub} is not known"),
        (RULE.replace('["t"]', '["${name}"]'), "${name} is not known: this key knows only ${sub}"),
        (RULE.replace('["t"]', '["http://x"]'), "no topic can match"),
        (RULE.replace('["t"]', '["a/b"]'), "no topic can match"),
        (RULE.replace('["t"]', '["t-partition-1"]'), "rules are for whole topics"),
        (
            RULE.replace('"publish"', '"publish", "read"') + 'producers = ["p"]\n',
            "producers is for rules whose only action",
        ),
        (RULE.replace("allow", "alow"), "'alow' is no table of a rules file"),
        (RULE.replace("[[allow]]", "[allow]"), "allow should be tables: write [[allow]]"),
        (RULE + "[[allow]\n", "line 5"),
        ('[[share]]\nsubjects = ["*"]\n', "it limits nothing"),
        ('[[share]]\nsubjects = ["*"]\nstreams = 0\n', "share 1 (line 1): streams is 0"),
        ('[[share]]\nsubjects = ["*"]\nstreams = true\n', "streams is True"),
        ("[all]\nstreams = 5\n", "[all]: 'streams' is no key of this table"),
        ("all = 3\n", "it should be one table"),
        ("[all]\nbytes = 3\n", "'bytes' is no key of this table"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        _read(tmp_path, text)
    assert said in raised.value.message
    assert str(tmp_path / "rules.toml") in raised.value.message


def test_a_file_that_is_not_there_or_no_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read_rules(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_rules(tmp_path / "bytes.toml")
