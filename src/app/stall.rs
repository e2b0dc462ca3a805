//! A host that does not respond (complaint of every bridge: it looks healthy). Calls wait for it, get
//! no error, and their streams say so.

use std::rc::Rc;
use std::time::Duration;

use bytes::Bytes;

use super::Core;
use super::exchange::Exchange;

/// How often it is looked whether the host responds.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const STALLED: &str = "the host does not respond; the call waits for it";
const RESUMED: &str = "the host responds again";

impl Core {
    /// Tells the callers of running calls when the host falls silent and when it is back.
    pub(super) async fn watch_host(self: Rc<Self>) {
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let is_stalled = self.link.is_stalled();
            if self.stalled.replace(is_stalled) == is_stalled {
                continue;
            }
            let text = if is_stalled { STALLED } else { RESUMED };
            tracing::warn!("{text}");
            let running = self.ledger.borrow().running();
            let exchanges: Vec<_> =
                running.iter().filter_map(|call| self.exchanges.borrow().get(call).cloned()).collect();
            for exchange in exchanges {
                self.tell_caller(&exchange, text);
            }
        }
    }

    /// A call that is to wait from the beginning is told at once; one that comes just before the stall
    /// is noticed is told then.
    pub(super) fn tell_if_stalled(&self, exchange: &Exchange) {
        if self.stalled.get() {
            self.tell_caller(exchange, STALLED);
        }
    }

    fn tell_caller(&self, exchange: &Exchange, text: &str) {
        if self.wants_level(&exchange.seat().sid, "warning") {
            let message = format!(
                r#"{{"jsonrpc":"2.0","method":"notifications/message","params":{{"level":"warning","logger":"a2mcp","data":"{text}"}}}}"#
            );
            exchange.tell(vec![Bytes::from(message)]);
        }
    }
}
