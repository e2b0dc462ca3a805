//! Contract 6, reading on the real dufs: pages that promise callers nothing they may not do.

use base64::Engine as _;
use serde_json::{Value, json};

use crate::share::{Shared, VERSIONS};

#[test]
fn no_page_promises_callers_what_is_refused() {
    for version in VERSIONS {
        let shared = Shared::start(version);
        shared.write("a/one.txt", "text");
        for path in ["/", "/a", "/a?json=1", "/a?sort=name&order=desc", "/a/one.txt?edit", "/a/one.txt?view"]
        {
            let page = shared.get(path).text();
            let at = page.find("id=\"index-data\">").expect("a page of dufs") + "id=\"index-data\">".len();
            let data = page[at..].split('<').next().unwrap();
            let data = base64::engine::general_purpose::STANDARD.decode(data).unwrap();
            let data: Value = serde_json::from_slice(&data).unwrap();
            let rights = (&data["allow_upload"], &data["allow_delete"]);
            assert_eq!(rights, (&json!(true), &json!(false)), "{path}: {data}");
        }
        for path in ["/?json", "/a?json&sort=name", "/a?json=1&json"] {
            let data = shared.get(path).json();
            let rights = (&data["allow_upload"], &data["allow_archive"], &data["allow_delete"]);
            assert_eq!(rights, (&json!(true), &json!(true), &json!(false)), "{path}");
        }
        // What they do promise.
        assert_eq!(shared.put("/a/one.txt", "saved"), 201);
        assert_eq!(shared.get("/a/one.txt").text(), "saved");
    }
}
