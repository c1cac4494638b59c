//! `atoll invite`: a code with which others join.

use serde::Serialize;

use crate::connection;
use crate::failure::Failure;
use crate::global::Global;
use crate::messages::note;
use crate::output::Output;

/// Arguments of `atoll invite`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll invite
  atoll invite | ssh other 'atoll up --join -'

The code makes its holder a member of the network: send it in confidence.")]
pub(crate) struct Args {
    /// One JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct JsonInvitation {
    code: String,
    bootstrap: Vec<String>,
    warning: Option<String>,
}

/// Prints the code.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let client = connection::impatient(global).await?;
    let invitation = client.invite().await.map_err(connection::failure)?;
    let mut output = Output::new();
    if args.json {
        output.json(&JsonInvitation {
            code: invitation.code.to_string(),
            bootstrap: invitation.code.bootstrap.iter().map(|p| p.addr.to_string()).collect(),
            warning: invitation.warning,
        })?;
        return output.flush();
    }
    if let Some(warning) = invitation.warning {
        note!("note: {warning}");
    }
    output.line(invitation.code.to_string())?;
    output.flush()
}
