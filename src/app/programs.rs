//! The programs of others that the bridge runs, found or fetched ([`crate::install`]), and what the
//! audit says of a fetch: one record before a byte is asked for, another when it fails (contract 11).

use super::Core;
use crate::audit::Record;
use crate::install::{InstallError, Installed, Progress, Tool};

impl Core {
    /// The program that the config means; may take as long as a download. `told` hears how far it is.
    ///
    /// # Errors
    /// [`InstallError`], whose text says what to do.
    pub(super) async fn obtain(
        &self,
        tool: Tool,
        told: impl AsyncFn(&Progress),
    ) -> Result<Installed, InstallError> {
        let value = match tool {
            Tool::Dufs => &self.config.xfer_dufs,
            Tool::Cloudflared => &self.config.xfer_cloudflared,
        };
        let mut fetched = None;
        let found = self.installer.obtain(tool, value, async |progress| {
            told(&progress).await;
            if let Some(args) = progress.audit_args() {
                tracing::info!(%tool, %args, "a program is fetched");
                self.audit.write(Record::action("xfer", None, &args.to_string(), false)).await;
                fetched = Some(args);
            }
        });
        let found = found.await;
        if let (Err(error), Some(mut args)) = (&found, fetched) {
            args["error"] = error.to_string().into();
            self.audit.write(Record::action("xfer", None, &args.to_string(), true)).await;
        }
        found
    }
}
