//! The bearer token: made, checked and compared here, and shown only where a caller asks for it by
//! name ([`Token::expose`]). It has no `Display`, and its `Debug` shows the public prefix.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use subtle::ConstantTimeEq as _;

/// A bearer token that satisfies contract 2.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// Fewest characters accepted.
    pub const MIN_CHARS: usize = 32;
    /// Most characters accepted: a longer one would crowd out a request's other headers.
    pub const MAX_CHARS: usize = 4096;
    /// What a valid token is, for error texts.
    pub const EXPECTATION: &str =
        "a string of 32 to 4096 characters without white space or control characters";

    /// A new random token: 32 bytes as base64url, 43 characters.
    pub fn generate() -> std::io::Result<Token> {
        let mut bytes = [0u8; 32];
        let mut filled = 0;
        while filled < bytes.len() {
            match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
                Ok(n) => filled += n,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Token(URL_SAFE_NO_PAD.encode(bytes)))
    }

    /// `None` when `text` is not what [`Token::EXPECTATION`] says.
    pub fn parse(text: &str) -> Option<Token> {
        let chars = text.chars().count();
        let sized = (Token::MIN_CHARS..=Token::MAX_CHARS).contains(&chars);
        let plain = !text.chars().any(|c| c.is_whitespace() || c.is_control());
        (sized && plain).then(|| Token(text.to_owned()))
    }

    /// Compares in constant time. Only the length can be learned from timing, and it is no secret.
    pub fn matches(&self, presented: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(presented).into()
    }

    /// The first six characters: enough for a person to tell two tokens apart, public by design.
    pub fn prefix(&self) -> &str {
        let end = self.0.char_indices().nth(6).map_or(self.0.len(), |(at, _)| at);
        &self.0[..end]
    }

    /// The secret itself. For the config file, the keyed hash, and an operator who asked for it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl PartialEq for Token {
    fn eq(&self, other: &Token) -> bool {
        self.matches(other.0.as_bytes())
    }
}

impl Eq for Token {}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({}…)", self.prefix())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_tokens_are_valid_and_different() {
        let (a, b) = (Token::generate().unwrap(), Token::generate().unwrap());
        assert_eq!(a.expose().len(), 43);
        assert!(a.expose().bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_'));
        assert!(Token::parse(a.expose()).is_some());
        assert_ne!(a, b);
    }

    #[test]
    fn only_the_exact_bytes_match() {
        let token = Token::parse("0123456789abcdef0123456789abcdef").unwrap();
        assert!(token.matches(b"0123456789abcdef0123456789abcdef"));
        assert!(!token.matches(b"0123456789abcdef0123456789abcdeF"));
        assert!(!token.matches(b"0123456789abcdef0123456789abcde"));
        assert!(!token.matches(b"0123456789abcdef0123456789abcdef0"));
        assert!(!token.matches(b""));
    }

    #[test]
    fn short_or_spaced_tokens_are_refused() {
        assert!(Token::parse(&"x".repeat(31)).is_none());
        assert!(Token::parse(&"x".repeat(32)).is_some());
        assert!(Token::parse(&"x".repeat(4097)).is_none());
        for bad in [" ", "\t", "\n", "\u{a0}", "\u{0}", "\u{7f}"] {
            assert!(Token::parse(&format!("{}{bad}", "x".repeat(40))).is_none());
        }
    }

    #[test]
    fn debug_output_holds_the_prefix_only() {
        let token = Token::parse("0123456789abcdef0123456789abcdef").unwrap();
        assert_eq!(format!("{token:?}"), "Token(012345…)");
    }
}
