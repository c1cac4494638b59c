//! `atoll cat`: files of volumes on standard output.

use futures_util::StreamExt;

use crate::address::Address;
use crate::failure::Failure;
use crate::global::Global;
use crate::output::Output;
use crate::read_key::ReadKeyArgs;
use crate::reading::Reading;

/// Arguments of `atoll cat`.
#[derive(clap::Args, Debug)]
#[command(after_help = "Examples:
  atoll cat atoll:KEY/README.md
  atoll cat atoll:KEY/logs/a atoll:KEY/logs/b | grep error
  atoll cat atoll:KEY/backup.tar | tar x")]
pub(crate) struct Args {
    /// Which files
    #[arg(value_name = "ADDR/PATH", required = true, value_parser = Address::parser())]
    addresses: Vec<Address>,

    #[command(flatten)]
    read_key: ReadKeyArgs,
}

/// Writes the files, one after another.
pub(crate) async fn run(args: &Args, global: &Global) -> Result<(), Failure> {
    let mut output = Output::new();
    let given = args.read_key.given()?;
    for address in &args.addresses {
        let reading = Reading::open(global, address, &given).await?;
        let file = reading.follow().await?;
        reading.require_file(&file, "write out")?;
        let mut stream = reading.snapshot.read_stream(&file);
        while let Some(bytes) = stream.next().await {
            match bytes {
                Ok(bytes) => output.bytes(&bytes)?,
                Err(error) => {
                    let error = reading.volume.explained(error).await;
                    return Err(reading.failure("write out", &error));
                }
            }
        }
    }
    output.flush()
}
