//! A client on crates.io `rmcp` 3.11 in its default mode. ../../README.md describes the scenarios and
//! what is printed.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::{Context as _, Result, anyhow, bail};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::join_all;
use rmcp::model::{CallToolRequestParams, ClientRequest, JsonObject, PingRequest};
use rmcp::service::{RunningService, ServiceError};
use rmcp::transport::StreamableHttpClientTransport;
use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;
use rmcp::{RoleClient, ServiceExt as _};
use serde::Deserialize;
use serde_json::{Value, json};

const SCENARIOS: &str = "list|basics|parallel";

type Client = RunningService<RoleClient, ()>;

#[derive(Deserialize)]
struct Parameters {
    #[serde(default)]
    calls: Vec<Call>,
}

#[derive(Deserialize)]
struct Call {
    name: String,
    arguments: Option<JsonObject>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let scenario = arguments.next().unwrap_or_default();
    let parameters = serde_json::from_str(&match arguments.next().as_deref() {
        None => "{}".to_owned(),
        Some("-") => std::io::read_to_string(std::io::stdin())?,
        Some(text) => text.to_owned(),
    })?;
    let findings = match scenario.as_str() {
        "list" => list().await,
        "basics" => basics(parameters).await,
        "parallel" => parallel(parameters).await,
        _ => bail!("usage: rmcp-client {SCENARIOS} [PARAMETERS|-]"),
    }?;
    writeln!(std::io::stdout(), "{findings}")?;
    Ok(())
}

async fn list() -> Result<Value> {
    let client = connect().await?;
    let tools = tool_names(&client).await?;
    client.cancel().await?;
    Ok(json!({ "tools": tools }))
}

async fn basics(Parameters { calls }: Parameters) -> Result<Value> {
    let client = connect().await?;
    let tools = tool_names(&client).await?;
    let mut results = Vec::new();
    for call in calls {
        results.push(outcome(&client, call).await?);
    }
    let ping = match client.send_request(ClientRequest::PingRequest(PingRequest::default())).await {
        Ok(_) => json!(true),
        Err(error) => json!(error.to_string()),
    };
    let peer = client.peer_info().context("the server did not introduce itself")?;
    let findings = json!({
        "serverInfo": peer.server_info,
        "protocolVersion": peer.protocol_version,
        "tools": tools,
        "results": results,
        "ping": ping,
    });
    client.cancel().await?;
    Ok(findings)
}

async fn parallel(Parameters { calls }: Parameters) -> Result<Value> {
    let client = connect().await?;
    let outcomes = join_all(calls.into_iter().map(|call| outcome(&client, call))).await;
    let results = outcomes.into_iter().collect::<Result<Vec<_>>>()?;
    client.cancel().await?;
    Ok(json!({ "results": results }))
}

/// Connects in the SDK's default mode.
async fn connect() -> Result<Client> {
    let config = StreamableHttpClientTransportConfig::with_uri(required("A2MCP_URL")?)
        .auth_header(required("A2MCP_TOKEN")?);
    Ok(().serve(StreamableHttpClientTransport::from_config(config)).await?)
}

async fn tool_names(client: &Client) -> Result<Vec<String>> {
    Ok(client.list_all_tools().await?.into_iter().map(|tool| tool.name.into_owned()).collect())
}

async fn outcome(client: &Client, call: Call) -> Result<Value> {
    let mut params = CallToolRequestParams::new(call.name);
    params.arguments = call.arguments;
    match client.call_tool(params).await {
        Ok(result) => {
            let mut content = serde_json::to_value(&result.content)?;
            content.as_array_mut().into_iter().flatten().try_for_each(drop_data)?;
            Ok(json!({ "isError": result.is_error.unwrap_or(false), "content": content }))
        }
        Err(ServiceError::McpError(error)) => {
            Ok(json!({ "error": { "code": error.code.0, "message": error.message } }))
        }
        Err(error) => Err(error.into()),
    }
}

fn drop_data(block: &mut Value) -> Result<()> {
    let block = block.as_object_mut().context("a content block is no object")?;
    if let Some(data) = block.remove("data") {
        let bytes = STANDARD.decode(data.as_str().context("data is no string")?)?.len();
        block.insert("bytes".to_owned(), bytes.into());
    }
    Ok(())
}

fn required(name: &str) -> Result<String> {
    std::env::var(name).map_err(|_| anyhow!("the environment variable {name} is missing"))
}
