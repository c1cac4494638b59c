//! The commands, one module each.

pub(crate) mod cat;
pub(crate) mod compare;
pub(crate) mod completions;
pub(crate) mod conflicts;
pub(crate) mod contribute;
pub(crate) mod gc;
pub(crate) mod get;
pub(crate) mod grant;
pub(crate) mod group;
pub(crate) mod id;
pub(crate) mod invite;
#[cfg(feature = "lab")]
pub(crate) mod lab;
pub(crate) mod log;
pub(crate) mod ls;
pub(crate) mod man;
pub(crate) mod member;
pub(crate) mod mount;
mod named_node;
pub(crate) mod publish;
pub(crate) mod quota;
pub(crate) mod recover;
pub(crate) mod renew;
pub(crate) mod restore;
pub(crate) mod secret;
pub(crate) mod settings;
pub(crate) mod stat;
pub(crate) mod status;
pub(crate) mod tree;
pub(crate) mod unmount;
pub(crate) mod unpublish;
pub(crate) mod up;
pub(crate) mod volume;
pub(crate) mod volumes;
pub(crate) mod why;
