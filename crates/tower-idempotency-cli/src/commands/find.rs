//! `idempotency find`.

use std::{fs, path::PathBuf};

use http::HeaderName;
use tower_idempotency::{IdempotencyLayer, MemoryStore, Principal, inspect::Inspect as _};
use tower_idempotency_console::describe::ids_of_key;

use super::show;
use crate::{
    context::Context,
    failure::{Exit, Failure},
};

/// Find the entry of a key, from the key and the value that identifies its caller
///
/// The settings have to be those of the service. Keys and principals on a command line are in the history of the shell:
/// prefer the options that read a file.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The key that the client sent, with or without quotes
    #[arg(long, required_unless_present = "key_file")]
    key: Option<String>,

    /// A file with the key
    #[arg(long, value_name = "FILE", conflicts_with = "key")]
    key_file: Option<PathBuf>,

    /// The value that identifies the caller, such as that of its header Authorization. None for an anonymous caller
    #[arg(long, value_name = "VALUE")]
    principal: Option<String>,

    /// A file with that value
    #[arg(long, value_name = "FILE", conflicts_with = "principal")]
    principal_file: Option<PathBuf>,

    #[command(flatten)]
    identity: Identity,
}

/// Settings of the service on which the id of an entry depends.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Identity {
    /// The principal of the service: credentials, authorization, unscoped, header:NAME or cookie:NAME
    #[arg(long, default_value = "credentials", value_name = "SOURCE", value_parser = principal)]
    principal_from: Principal,

    /// The namespace of the service
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,

    /// A file with the secret of the service, if it has one. A line break at its end does not count
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
}

impl Identity {
    /// Creates a layer with these settings.
    pub(crate) fn layer(&self) -> Result<IdempotencyLayer, Failure> {
        // The service decides which lengths it accepts. The id does not depend on them.
        let mut layer = IdempotencyLayer::new(MemoryStore::new())
            .with_principal(self.principal_from.clone())
            .with_key_length(1..=usize::MAX);
        if let Some(namespace) = &self.namespace {
            layer = layer.with_namespace(namespace.as_str());
        }
        if let Some(path) = &self.secret_file {
            let mut secret = read(path)?;
            // The proxy ignores these line breaks too.
            while secret
                .pop_if(|byte| matches!(byte, b'\r' | b'\n'))
                .is_some()
            {}
            let with_secret = layer.with_secret(secret);
            layer = with_secret.map_err(|error| Failure::usage(error.to_string()))?;
        }
        Ok(layer)
    }
}

pub(crate) async fn run(context: &Context, args: &Args) -> Result<Exit, Failure> {
    let layer = args.identity.layer()?;
    let key = match (&args.key, &args.key_file) {
        (Some(key), _) => key.clone(),
        (None, Some(path)) => text(path)?,
        (None, None) => return Err(Failure::usage("expected --key or --key-file")),
    };
    let principal = match (&args.principal, &args.principal_file) {
        (Some(principal), _) => Some(principal.clone()),
        (None, Some(path)) => Some(text(path)?),
        (None, None) => None,
    };
    let principal: Vec<&[u8]> = principal.iter().map(String::as_bytes).collect();
    let ids = ids_of_key(&layer, &key, &principal);
    let ids = ids.map_err(|error| Failure::usage(error.to_string()))?;
    for id in &ids {
        if let Some(details) = context.call(context.store.get(id)).await? {
            show::print(context, &details)?;
            return Ok(Exit::Done);
        }
    }
    let ids: Vec<_> = ids.iter().map(|id| id.to_hex()).collect();
    Err(Failure::new(
        Exit::NotFound,
        format!(
            "the store has no entry of this key: namespace, secret and principal must be those of the service; to find an observed request, run list STATE --operation 'observed: ' (ids: {})",
            ids.join(", ")
        ),
    ))
}

fn read(path: &PathBuf) -> Result<Vec<u8>, Failure> {
    fs::read(path)
        .map_err(|error| Failure::failed(format!("cannot read {}: {error}", path.display())))
}

/// Returns the text of a file without its last line end.
fn text(path: &PathBuf) -> Result<String, Failure> {
    let text = String::from_utf8(read(path)?);
    let text = text.map_err(|_| Failure::usage(format!("expected text in {}", path.display())))?;
    Ok(text.trim_end_matches(['\n', '\r']).to_owned())
}

fn principal(text: &str) -> Result<Principal, String> {
    match text.split_once(':') {
        None if text == "credentials" => Ok(Principal::credentials()),
        None if text == "authorization" => Ok(Principal::authorization()),
        None if text == "unscoped" => Ok(Principal::unscoped()),
        Some(("cookie", name)) if !name.is_empty() => Ok(Principal::cookie(name)),
        Some(("header", name)) => match name.parse::<HeaderName>() {
            Ok(name) => Ok(Principal::header(name)),
            Err(_) => Err("expected the name of a header after header:".to_owned()),
        },
        _ => Err(
            "expected credentials, authorization, unscoped, header:NAME or cookie:NAME".to_owned(),
        ),
    }
}
