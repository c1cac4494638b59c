//! Who is charged for blocks, and whether there is room for more (CFS §5.4).

pub(crate) mod admission;
pub(crate) mod attribution;
pub(crate) mod confirm;
pub(crate) mod owner;
pub mod quota;
pub mod receipt;
