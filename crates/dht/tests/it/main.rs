//! The block layer on simulated rings. A failing run prints its seed; the same seed
//! replays it.

mod claims;
mod hostile;
mod leases;
mod ring;
mod soak;
