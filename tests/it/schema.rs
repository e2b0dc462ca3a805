//! The frame schema and its fixtures agree: what `ipc-schema/fixtures` calls valid is accepted by
//! the definition of its direction, what it calls invalid is not; and the codec makes of the wire
//! fixtures what they say.

use a2mcp::frame::envelope::EnvelopeError;
use a2mcp::frame::{Envelope, FrameCodec, FrameError};
use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use bytes::BytesMut;
use jsonschema::Validator;
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;
use tokio_util::codec::Decoder;

use crate::support::Host;

const SCHEMA: &str = include_str!("../../ipc-schema/a2mcp-frames.schema.json");
const MESSAGES: &str = include_str!("../../ipc-schema/fixtures/messages.json");

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fixture {
    name: String,
    direction: Direction,
    valid: bool,
    def: Option<String>,
    #[serde(rename = "why")]
    _why: Option<String>,
    message: Value,
}

#[derive(Deserialize, Clone, Copy)]
#[serde(rename_all = "lowercase")]
enum Direction {
    Shim,
    Sidecar,
}

impl Direction {
    fn def(self) -> &'static str {
        match self {
            Direction::Shim => "fromShim",
            Direction::Sidecar => "fromSidecar",
        }
    }
}

fn fixtures() -> Result<Vec<Fixture>> {
    Ok(serde_json::from_str(MESSAGES)?)
}

/// A validator for one definition of the schema, cross-references included.
fn validator(def: &str) -> Result<Validator> {
    let mut schema: Value = serde_json::from_str(SCHEMA)?;
    let root = schema.as_object_mut().context("the schema is an object")?;
    ensure!(root["$defs"].get(def).is_some(), "the schema has no $defs/{def}");
    root.remove("anyOf");
    root.insert("$ref".into(), format!("#/$defs/{def}").into());
    Ok(jsonschema::draft202012::new(&schema)?)
}

/// Fails unless the schema accepts `message` as sent by a `"shim"` or a `"sidecar"`.
pub(crate) fn assert_speaks(from: &str, message: &Value) {
    static SHIM: LazyLock<Validator> = LazyLock::new(|| validator("fromShim").unwrap());
    static SIDECAR: LazyLock<Validator> = LazyLock::new(|| validator("fromSidecar").unwrap());
    let validator = if from == "shim" { &SHIM } else { &SIDECAR };
    assert!(validator.is_valid(message), "no {from} may send {message}");
}

/// What a real sidecar sends is what the schema says.
#[test]
fn a_sidecar_speaks_as_the_schema_says() {
    let host = Host::start();
    let mut client = host.client();
    assert_eq!(client.call_text("echo", r#"{"a":1}"#), r#"{"a":1}"#);
    client.call_text("fail", "{}");
    client.start_call("9", "hang", "{}");
    host.call_frame("hang");
    let cancel = r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":9}}"#;
    client.again().post(cancel);
    host.frame(|frame| frame["method"] == "notifications/cancelled");
    host.send(r#"{"jsonrpc":"2.0","id":"p","method":"bridge/ping","params":{}}"#);
    host.send(r#"{"jsonrpc":"2.0","id":"c","method":"bridge/command","params":{"argv":["status"]}}"#);
    let command = host.frame(|frame| frame["id"] == "c");
    assert!(validator("commandResponse").unwrap().is_valid(&command), "{command}");
    host.send(r#"{"jsonrpc":"2.0","id":"s","method":"bridge/stop","params":{"graceMs":0}}"#);
    host.frame(|frame| frame["method"] == "bridge/goodbye");
    host.drained();
    for frame in host.frames() {
        assert_speaks("sidecar", &serde_json::from_str(&frame).unwrap());
    }
    let hello = host.frame(|frame| frame["id"] == "hello");
    assert!(validator("helloResponse").unwrap().is_valid(&hello), "{hello}");
}

#[test]
fn the_schema_is_valid_2020_12() -> Result<()> {
    let schema: Value = serde_json::from_str(SCHEMA)?;
    ensure!(jsonschema::draft202012::meta::is_valid(&schema));
    Ok(())
}

#[test]
fn every_fixture_is_judged_as_it_says() -> Result<()> {
    let mut validators: BTreeMap<String, Validator> = BTreeMap::new();
    let mut wrong = Vec::new();
    for fixture in fixtures()? {
        let mut accepted = true;
        let mut reasons = Vec::new();
        let defs = [Some(fixture.direction.def().to_owned()), fixture.def.clone()];
        for def in defs.into_iter().flatten() {
            if !validators.contains_key(&def) {
                validators.insert(def.clone(), validator(&def)?);
            }
            for error in validators[&def].iter_errors(&fixture.message) {
                accepted = false;
                reasons.push(format!("{def}: {error}"));
            }
        }
        if accepted != fixture.valid {
            wrong.push(format!("{}: valid is {}, {reasons:?}", fixture.name, fixture.valid));
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Unknown fields are ignored: every valid message stays valid when something is added at its top,
/// in its params and in its result.
#[test]
fn unknown_fields_change_nothing() -> Result<()> {
    let directions = [validator("fromShim")?, validator("fromSidecar")?];
    for mut fixture in fixtures()?.into_iter().filter(|fixture| fixture.valid) {
        fixture.message["x-unknown"] = Value::from(1);
        for part in ["params", "result"] {
            if let Some(Value::Object(fields)) = fixture.message.get_mut(part) {
                fields.insert("x-unknown".into(), Value::Null);
            }
        }
        ensure!(directions[fixture.direction as usize].is_valid(&fixture.message), "{}", fixture.name);
        if let Some(def) = &fixture.def {
            ensure!(validator(def)?.is_valid(&fixture.message), "{} ({def})", fixture.name);
        }
    }
    Ok(())
}

/// Each message of the schema has a valid and an invalid fixture; a definition nobody tries is a guess.
#[test]
fn every_message_has_valid_and_invalid_fixtures() -> Result<()> {
    let schema: Value = serde_json::from_str(SCHEMA)?;
    let defs = schema["$defs"].as_object().context("$defs")?;
    let is_message =
        |name: &&String| ["Request", "Response", "Notification"].iter().any(|kind| name.ends_with(kind));
    let mut methods: BTreeSet<String> = BTreeSet::new();
    let mut responses: BTreeSet<String> = BTreeSet::new();
    for (name, def) in defs.iter().filter(|(name, _)| is_message(name)) {
        match def["properties"]["method"]["const"].as_str() {
            Some(method) => methods.insert(method.to_owned()),
            None => responses.insert(name.clone()),
        };
    }
    let fixtures = fixtures()?;
    for valid in [true, false] {
        let of = |f: &&Fixture| f.valid == valid;
        for method in &methods {
            let some = fixtures.iter().filter(of).any(|f| f.message["method"] == method.as_str());
            ensure!(some, "no fixture for {method} with valid = {valid}");
        }
        for response in responses.iter().filter(|name| !name.starts_with("relayed")) {
            let some = fixtures.iter().filter(of).any(|f| f.def.as_ref() == Some(response));
            ensure!(some, "no fixture for {response} with valid = {valid}");
        }
    }
    let names: BTreeSet<&str> = fixtures.iter().map(|f| f.name.as_str()).collect();
    ensure!(names.len() == fixtures.len(), "two fixtures have the same name");
    Ok(())
}

/// One case of `frames.json`.
#[derive(Deserialize)]
pub(crate) struct WireFixture {
    pub(crate) name: String,
    bytes: Value,
    pub(crate) expect: Vec<Value>,
}

pub(crate) fn wire_fixtures() -> Vec<WireFixture> {
    serde_json::from_str(include_str!("../../ipc-schema/fixtures/frames.json")).unwrap()
}

impl WireFixture {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let base64 = &base64::engine::general_purpose::STANDARD;
        pieces(&self.bytes, &|text| base64.decode(text).unwrap())
    }
}

/// One text, or a list of texts and `{repeat, times}`.
fn pieces(value: &Value, decode: &dyn Fn(&str) -> Vec<u8>) -> Vec<u8> {
    match value {
        Value::Array(list) => list.iter().flat_map(|piece| pieces(piece, decode)).collect(),
        Value::Object(repeat) => {
            let times = usize::try_from(repeat["times"].as_u64().unwrap()).unwrap();
            decode(repeat["repeat"].as_str().unwrap()).repeat(times)
        }
        text => decode(text.as_str().unwrap()),
    }
}

/// What a reader made of a frame, in the words of the fixtures.
#[derive(Debug, PartialEq)]
enum Read {
    Frame(Vec<u8>),
    Skipped(String),
    End(String),
    Incomplete,
}

fn read_all<'a>(chunks: impl Iterator<Item = &'a [u8]>) -> Vec<Read> {
    let (mut codec, mut buffer, mut reads) = (FrameCodec::default(), BytesMut::new(), Vec::new());
    for chunk in chunks {
        buffer.extend_from_slice(chunk);
        loop {
            match codec.decode(&mut buffer) {
                Ok(Some(frame)) => reads.push(match Envelope::parse(&frame) {
                    Ok(_) => Read::Frame(frame.to_vec()),
                    Err(_) if frame.is_empty() => Read::Skipped("zero length".into()),
                    Err(_) if std::str::from_utf8(&frame).is_err() => Read::Skipped("invalid utf-8".into()),
                    Err(EnvelopeError::NotJson) => Read::Skipped("invalid json".into()),
                    Err(EnvelopeError::NotAnObject) => Read::Skipped("not an object".into()),
                }),
                Ok(None) => break,
                Err(FrameError::TooLarge(_)) => {
                    reads.push(Read::End("frame too large".into()));
                    return reads;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
    if matches!(codec.decode_eof(&mut buffer), Err(FrameError::Cut { .. })) {
        reads.push(Read::Incomplete);
    }
    reads
}

#[test]
fn every_wire_fixture_is_read_as_it_says_however_it_is_cut() {
    for fixture in wire_fixtures() {
        let expected: Vec<Read> = fixture
            .expect
            .iter()
            .map(|event| {
                let (kind, value) = event.as_object().unwrap().iter().next().unwrap();
                match kind.as_str() {
                    "frame" => Read::Frame(pieces(value, &|text| text.as_bytes().to_vec())),
                    "skipped" => Read::Skipped(value.as_str().unwrap().into()),
                    "end" => Read::End(value.as_str().unwrap().into()),
                    "incomplete" => Read::Incomplete,
                    other => panic!("{}: what is {other}?", fixture.name),
                }
            })
            .collect();
        let bytes = fixture.bytes();
        let step = if bytes.len() > 4096 { 997 } else { 1 };
        assert_eq!(read_all(bytes.chunks(step)), expected, "{} in chunks of {step}", fixture.name);
        if bytes.len() <= 4096 {
            for cut in 0..=bytes.len() {
                let halves = [&bytes[..cut], &bytes[cut..]];
                assert_eq!(read_all(halves.into_iter()), expected, "{} cut at {cut}", fixture.name);
            }
        }
    }
}
