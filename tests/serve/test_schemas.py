"""Every schema of a set over all keywords of JSON Schema is answered validly or refused by name."""

from collections import Counter

from schemas import check_schemas, schema_cases
from serving import running_server

WORDS = """
    $anchor $comment $defs $dynamicAnchor $dynamicRef $id $recursiveAnchor $recursiveRef $ref $schema $vocabulary
    additionalItems additionalProperties allOf anyOf const contains contentEncoding contentMediaType contentSchema
    default definitions dependencies dependentRequired dependentSchemas deprecated description else enum examples
    exclusiveMaximum exclusiveMinimum format if items maxContains maxItems maxLength maxProperties maximum minContains
    minItems minLength minProperties minimum multipleOf not oneOf pattern patternProperties prefixItems properties
    propertyNames readOnly required then title type unevaluatedItems unevaluatedProperties uniqueItems writeOnly
"""
"""The keywords of the drafts 4 to 2020-12."""


def test_the_set_has_300_schemas_over_all_keywords() -> None:
    cases = schema_cases()
    assert len({str(case.schema) for case in cases}) == len(cases) >= 300
    assert set(WORDS.split()) <= set(Counter(case.keyword for case in cases))


def test_every_schema_is_answered_validly_or_its_keyword_is_named() -> None:
    with running_server(rows=8) as server:
        (quote,) = server.service.loaded.model.codec.encode('"', add_special_tokens=False)
        bias = {"logit_bias": {quote: 8}}  # so that texts end
        report = check_schemas(server.http, lambda case: "hello", temperature=0, frequency_penalty=1.5, **bias)
    assert not report.wrong, "\n".join(report.wrong)
    assert report.answered >= 200 and report.refused >= 90
