"""Validates documents of OpenAPI, the examples in them, policies, and responses of a server: openapi_check.py FILE"""

import json
import sys

import jsonschema
import openapi_spec_validator
from openapi_schema_validator import OAS30Validator, OAS31Validator


def resolve(document, value):
    while "$ref" in value:
        reference = value["$ref"]
        value = document
        for token in reference.removeprefix("#/").split("/"):
            value = value[token.replace("~1", "/").replace("~0", "~")]
    return value


def validator(document, schema):
    """A validator of the schema, whose references lead into the document."""
    of_version = OAS31Validator if document["openapi"].startswith("3.1") else OAS30Validator
    root = {"components": document["components"], "allOf": [schema]}
    return of_version(root)


def bodies(document, path, status):
    item = resolve(document, document["paths"][path])
    responses = item["post"]["responses"]
    for name in (status, status[0] + "XX", "default"):
        if name in responses:
            response = resolve(document, responses[name])
            headers = {name.lower() for name in response.get("headers", {})}
            return response.get("content", {}), headers
    raise SystemExit(f"{path} {status} is not described")


def parsed(media_type, body):
    return json.loads(body) if "json" in media_type else body


def main():
    cases = json.load(open(sys.argv[1]))
    for document in cases["documents"]:
        openapi_spec_validator.validate(document)
        for path, item in document["paths"].items():
            for response in resolve(document, item)["post"]["responses"].values():
                for content in resolve(document, response).get("content", {}).values():
                    for example in content.get("examples", {}).values():
                        validator(document, content["schema"]).validate(example["value"])
    jsonschema.Draft202012Validator.check_schema(cases["schema"])
    for policy in cases["policies"]:
        jsonschema.Draft202012Validator(cases["schema"]).validate(policy)
    for response in cases["responses"]:
        document = cases["documents"][response["document"]]
        content, headers = bodies(document, response["path"], response["status"])
        media_type = (response["media_type"] or "").split(";")[0]
        if media_type not in content:
            raise SystemExit(f"{media_type} is not described: {response}")
        value = parsed(media_type, response["body"])
        validator(document, content[media_type]["schema"]).validate(value)
        for name in ("retry-after", "link", "idempotent-replayed", "idempotency-key"):
            if name in response["headers"] and name not in headers:
                raise SystemExit(f"the header {name} is not described: {response}")
    # The validators reject wrong values.
    wrong = validator(cases["documents"][0], {"$ref": "#/components/schemas/IdempotencyProblem"})
    if wrong.is_valid({"code": 1}):
        raise SystemExit("the validator of schemas accepts everything")
    broken = {**cases["documents"][0], "paths": {"/": {"post": {}}}}
    try:
        openapi_spec_validator.validate(broken)
    except Exception:
        pass
    else:
        raise SystemExit("the validator of documents accepts everything")
    print(f'{len(cases["documents"])} documents, {len(cases["policies"])} policies, {len(cases["responses"])} responses')


main()
