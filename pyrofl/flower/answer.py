"""The command `pyrofl study answer`: the reply of a site to a request in a file."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyrofl.experiments.console import REFUSED, Stopped, show, tell
from pyrofl.files.lock import lock_folder
from pyrofl.files.run_folder import prepare, write_json
from pyrofl.flower.commands import site_settings
from pyrofl.flower.file_transport import SERVER, file_name
from pyrofl.flower.project import Project, of_study
from pyrofl.flower.site import (
    DRAWS_REQUEST,
    EVALUATION_REQUEST,
    GREETING,
    LIKELIHOOD_REQUEST,
    STUDY_COMPLETE,
    SUMMARY_REQUEST,
    TRAINING_REQUEST,
    describe_tensors,
    record_leaving,
    reply,
    site_log,
)
from pyrofl.flower.site_state import read_own_json
from pyrofl.inference.transport.message_checks import Flat, one_line
from pyrofl.inference.transport.message_files import (
    Message,
    fingerprint,
    read_message,
    read_private_key,
    read_public_key,
    write_message,
)
from pyrofl.inference.transport.records import Records
from pyrofl.nouns import nouns

ANSWERED_FILE = "answered.json"  # study, keys and last request that a site has answered
ASKS = {
    GREETING: "names of {clients}, their numbers of training rows, and columns with warnings",
    SUMMARY_REQUEST: "summaries of the columns of the formula",
    EVALUATION_REQUEST: "scores of the models of the last round",
    TRAINING_REQUEST: "the update of round {round}",
    LIKELIHOOD_REQUEST: "log marginal likelihoods at posterior draws",
    DRAWS_REQUEST: "nothing; it brings posterior draws, which are stored here",
    STUDY_COMPLETE: "nothing; the study is complete",
}


@of_study
def answer(args: Namespace) -> None:
    """Print what a request asks for and what would leave; after consent, write the reply."""
    from pyrofl.flower.disclosure import leaving

    request = received(args)
    key, state = read_private_key(args.key), Path(args.state).absolute()
    site, project, rows, rules = site_settings(args, may_be_new=GREETING in request.records)
    show(asked(request))
    if args.show or GREETING in request.records:
        show(leaving(project, rows, site["min_scored_rows"], rules))
    if args.show:
        return
    path = Path(args.out or Path(args.request).with_name(reply_name(request)))
    refuse_place(path, request, key)
    prepare(state, overwrite=True)
    with lock_folder(state), site_log(state) as log:
        keys = {"key": key.public_key(), "server-key": read_public_key(args.server_key)}
        about = refuse_other_study(state, request, project, keys)
        try:
            replies = reply(site, request.records, log)
        except Exception as error:
            log.info("refused: %s", one_line(error))
            raise
        if STUDY_COMPLETE not in request.records:
            show(listed(replies))
            if not args.yes and not is_permitted():
                log.info("not sent: no consent")
                raise Stopped("no reply was written, as you did not agree", REFUSED)
            record_leaving(site, replies, log)
            write_message(
                path,
                replies,
                key,
                study=request.study,
                sender=args.name,
                recipient=SERVER,
                number=request.number,
                answers=request.id,
            )
        write_json(state / ANSWERED_FILE, about)
    if STUDY_COMPLETE in request.records:
        show(
            f"the study is complete; no reply is needed, and {state} holds the results of the "
            f"{nouns().site}"
        )
    else:
        show(f"{path} is the reply; send it to the server")


def received(args: Namespace) -> Message:
    """Return the request of a file; raise ValueError unless it is one of the server to the site."""
    request = read_message(args.request, {SERVER: read_public_key(args.server_key)})
    if request.answers:
        raise ValueError(f"{args.request} is a reply; expected a request")
    if request.recipient != args.name:
        name = one_line(request.recipient)
        raise ValueError(f"{args.request} is for {name}; expected a request for {args.name}")
    return request


def asked(request: Message) -> str:
    """Return in words what a request asks for."""
    lines = [f"Request {request.number} of study {request.study} asks for:"]
    for what, flat in sorted(request.records.items()):
        kind, *of = what.split("/")
        facts = {"round": "?"} | flat | {"clients": nouns().client.many}
        text = ASKS.get(kind, "what this version does not know").format(**facts)
        lines.append(f"{f'{of[0]}: ' if of else ''}{text}")
    return "\n".join(dict.fromkeys(lines))


def listed(replies: Records) -> str:
    """Return what a reply has, without values: names of tensors with their shapes, and texts."""
    lines = ["The reply has:"]
    for what, flat in replies.items():
        texts = [
            f"{name} ({len(json.dumps(value)):,} characters)"
            for name, value in flat.items()
            if isinstance(value, str | tuple)
        ]
        lines += [f"{what}: {one}" for one in (*describe_tensors(flat), *texts)]
    return "\n".join(lines)


def is_permitted() -> bool:
    """Ask a person whether the reply may be written."""
    tell("write the reply? [y/N] ")
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        raise ValueError("there is no consent; expected the answer y, or --yes") from None


def reply_name(request: Message) -> str:
    """Return the usual name of the file of a reply."""
    return file_name(request.recipient, "reply", request.number)


def refuse_place(path: Path, request: Message, key: Any) -> None:
    """Raise ValueError if a reply cannot be written to a path, or would replace another file."""
    if path.is_file():
        try:
            read_message(path, {request.recipient: key.public_key()}, request.study)
        except ValueError:
            raise ValueError(
                f"{path} exists and is no reply of {request.recipient}; expected another --out"
            ) from None
    if path.is_dir() or not path.parent.is_dir():
        kind = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise ValueError(f"{path} {kind}; expected a file such as {reply_name(request)} (--out)")


def refuse_other_study(
    state: Path, request: Message, project: Project, keys: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return study, keys, project and number of a request, to be stored with its reply.

    Raises:
        ValueError: if a site has answered a later request, or one of another study, with other
            keys or by another project.
    """
    file = state / ANSWERED_FILE
    now: Flat = {"study": request.study, "number": request.number}
    now |= {"request": request.id, "project": json.dumps(project.agreed, sort_keys=True)}
    now |= {option: fingerprint(key) for option, key in keys.items()}
    if not file.exists():
        return now
    before = read_own_json(file)
    if before["study"] != now["study"]:
        raise ValueError(
            f"{state} is of study {before['study']}, and the request of {now['study']}; expected "
            "another --state for another study"
        )
    last = before["number"], before["request"]
    if now["number"] < before["number"] or (last[0] == now["number"] and last[1] != now["request"]):
        raise ValueError(
            f"request {now['number']} came after request {last[0]}, which is answered; expected a "
            "later one, or that one again"
        )
    for option in keys:
        if before.get(option, now[option]) != now[option]:
            raise ValueError(
                f"--{option} is {now[option]}; expected the key of the first reply, "
                f"{before[option]}"
            )
    if before["project"] != now["project"] and GREETING not in request.records:
        raise ValueError(
            f"{project.file} has changed since request {last[0]}; expected the study file of the "
            "server, which compares a change by a request of its own"
        )
    return now
