//! Names and paths in the commands that messages advise.

/// A name or path as a shell takes it for one word: quoted, unless all its characters are plain.
///
/// ```
/// assert_eq!(atoll_node::shell_word("docs"), "docs");
/// assert_eq!(atoll_node::shell_word("my work"), "'my work'");
/// assert_eq!(atoll_node::shell_word("it's"), r"'it'\''s'");
/// ```
pub fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+:,@%#=".contains(c);
    match !text.is_empty() && !text.starts_with('#') && text.chars().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_sees_one_word_of_the_name() {
        let names =
            ["docs", "/a/b-1.latm.xz", "my work", "it's here", "$HOME", "#1", "", "a;b", "ü"];
        for name in names {
            let script = format!("printf %s {}", shell_word(name));
            let shell = std::process::Command::new("sh").arg("-c").arg(script).output();
            assert_eq!(shell.expect("a shell").stdout, name.as_bytes());
        }
        assert_eq!(shell_word("/a/b-1.latm.xz"), "/a/b-1.latm.xz");
    }
}
