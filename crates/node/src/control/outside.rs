//! Control calls of subsystems that are made outside this crate.
//!
//! This crate knows only their numbers: a request and a reply are bytes in one part, beside an
//! empty header, and an error is a text. All else of a request is checked as that of any call.

use std::ops::RangeInclusive;

use atoll_env::BoxFuture;
use atoll_net::Refusal;
use bytes::Bytes;

use super::body::{Block, WithPart, malformed};
use super::message::Unfit;
use super::server::Calls;

/// The numbers of such calls. No call of this crate has one of them.
pub const OUTSIDE_CALLS: RangeInclusive<u16> = 0x0380..=0x03ff;

/// The longest request or reply of such a call, bytes: a mebibyte of a file, and a header.
pub const MAX_OUTSIDE_BYTES: usize = (1 << 20) + (64 << 10);

/// The numbers that one subsystem has.
pub struct CallRange<'a> {
    calls: &'a mut Calls,
    numbers: RangeInclusive<u16>,
}

impl Calls {
    /// Takes some of [`OUTSIDE_CALLS`] for a subsystem.
    ///
    /// # Panics
    /// If one of them is no such number, or another subsystem has taken it.
    pub fn range(&mut self, numbers: RangeInclusive<u16>) -> CallRange<'_> {
        let is_outside = |number: &u16| OUTSIDE_CALLS.contains(number);
        assert!(
            !numbers.is_empty() && is_outside(numbers.start()) && is_outside(numbers.end()),
            "{numbers:#06x?} are not numbers of calls for subsystems made outside of the node"
        );
        let taken = self
            .ranges
            .iter()
            .find(|taken| taken.start() <= numbers.end() && numbers.start() <= taken.end());
        assert!(taken.is_none(), "{numbers:#06x?} are taken: {taken:#06x?}");
        self.ranges.push(numbers.clone());
        CallRange { calls: self, numbers }
    }
}

impl CallRange<'_> {
    /// Registers the handler of a call: it is given the bytes of the request, at most
    /// `max_bytes`, and resolves to those of the reply, at most [`MAX_OUTSIDE_BYTES`], or to why
    /// it was not done, for people.
    ///
    /// The caller is the node's owner, whose bytes are not trusted more than others'. A client
    /// sends a call again if the node goes away under it, so doing it twice must do no harm. The
    /// handler is dropped when the caller gives up, and must not wait for the disk on its thread.
    ///
    /// # Panics
    /// If the number is not in the range, has a handler, or `max_bytes` is more than
    /// [`MAX_OUTSIDE_BYTES`].
    pub fn on(
        &mut self,
        number: u16,
        max_bytes: usize,
        handler: impl Fn(Bytes) -> BoxFuture<'static, Result<Bytes, String>> + Send + Sync + 'static,
    ) -> &mut Self {
        assert!(self.numbers.contains(&number), "{number:#06x} is not in {:#06x?}", self.numbers);
        assert!(max_bytes <= MAX_OUTSIDE_BYTES, "{max_bytes} bytes are too many for a request");
        let name = format!("{number:#06x}");
        self.calls.insert::<Block, Block, Unfit>(number, &name, move |WithPart(_, request)| {
            if request.len() > max_bytes {
                let why = format!("{} bytes, more than {max_bytes}", request.len());
                return Box::pin(std::future::ready(Err(malformed(why))));
            }
            let handled = handler(request);
            Box::pin(async move {
                match handled.await {
                    Ok(reply) if reply.len() > MAX_OUTSIDE_BYTES => {
                        let why = format!("a reply of {} bytes is too long", reply.len());
                        Err(Refusal::new(Refusal::INTERNAL, why))
                    }
                    Ok(reply) => Ok(Ok(Block::of(reply))),
                    Err(why) => Ok(Err(Unfit::from(why))),
                }
            })
        });
        self
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use atoll_net::{LOCAL_CALLER, Reply, Request, Service};

    use super::*;
    use crate::control::message::{self, Answer, Empty};

    const NUMBER: u16 = *OUTSIDE_CALLS.start();

    /// A call that answers its request, and how often its handler ran.
    fn scene(
        answer: impl Fn(Bytes) -> Result<Bytes, String> + Send + Sync + 'static,
    ) -> (Calls, Arc<AtomicUsize>) {
        let (mut calls, ran) = (Calls::default(), Arc::new(AtomicUsize::new(0)));
        let counted = ran.clone();
        calls.range(NUMBER..=NUMBER + 1).on(NUMBER, 8, move |request| {
            counted.fetch_add(1, Ordering::Relaxed);
            let answered = answer(request);
            Box::pin(async { answered })
        });
        (calls, ran)
    }

    async fn send(
        calls: &Calls,
        method: u16,
        header: impl Into<Bytes>,
        parts: &[&[u8]],
    ) -> Result<Reply, Refusal> {
        let parts = parts.iter().map(|part| Bytes::copy_from_slice(part)).collect();
        calls.handle(LOCAL_CALLER, Request { method, header: header.into(), parts }).await
    }

    #[tokio::test]
    async fn requests_are_checked_as_those_of_any_call() {
        let (calls, ran) = scene(Ok);
        let empty = || message::encode(&Empty {});
        let trailing = [&empty()[..], b"\x00"].concat();
        let cases: Vec<(&str, u16, Bytes, Vec<&[u8]>)> = vec![
            ("a number without a handler", NUMBER + 1, empty(), vec![b"x"]),
            ("no header", NUMBER, Bytes::new(), vec![b"x"]),
            ("garbage", NUMBER, Bytes::from_static(&[0xff; 40]), vec![b"x"]),
            ("a byte behind the header", NUMBER, trailing.into(), vec![b"x"]),
            ("no part", NUMBER, empty(), vec![]),
            ("two parts", NUMBER, empty(), vec![b"x", b"y"]),
            ("too long", NUMBER, empty(), vec![b"123456789"]),
        ];
        for (what, method, header, parts) in cases {
            let refusal = send(&calls, method, header, &parts).await.expect_err(what);
            let code = match method {
                NUMBER => Refusal::MALFORMED,
                _ => Refusal::UNKNOWN_METHOD,
            };
            assert_eq!(refusal.code, code, "{what}: {refusal}");
        }
        assert_eq!(ran.load(Ordering::Relaxed), 0);
        let reply = send(&calls, NUMBER, empty(), &[b"12345678"]).await.expect("short enough");
        assert_eq!((&reply.parts[..], ran.load(Ordering::Relaxed)), (&["12345678".into()][..], 1));
    }

    #[tokio::test]
    async fn errors_are_texts_that_fit_and_replies_have_a_limit() {
        let (calls, _) = scene(|request| match &request[..] {
            b"long" => Ok(vec![0; MAX_OUTSIDE_BYTES + 1].into()),
            b"longest" => Ok(vec![0; MAX_OUTSIDE_BYTES].into()),
            _ => Err("no ".repeat(100_000)),
        });
        let empty = || message::encode(&Empty {});
        let refusal = send(&calls, NUMBER, empty(), &[b"long"]).await.expect_err("too long");
        assert_eq!(refusal.code, Refusal::INTERNAL);
        let reply = send(&calls, NUMBER, empty(), &[b"longest"]).await.expect("fits");
        assert_eq!(reply.parts[0].len(), MAX_OUTSIDE_BYTES);
        let reply = send(&calls, NUMBER, empty(), &[b"?"]).await.expect("answered");
        let Ok(Answer::<Empty, Unfit>::Failed(Unfit::Unfit(why))) = message::decode(&reply.header)
        else {
            panic!("it has failed");
        };
        assert!(why.starts_with("no no") && why.len() < 100_000 && reply.parts.is_empty());
    }

    #[test]
    fn numbers_belong_to_one_subsystem_and_one_handler() {
        let (first, last) = (*OUTSIDE_CALLS.start(), *OUTSIDE_CALLS.end());
        let takes = |ranges: &[RangeInclusive<u16>]| {
            let mut calls = Calls::default();
            let take = || {
                for range in ranges {
                    calls.range(range.clone());
                }
            };
            catch_unwind(AssertUnwindSafe(take)).is_ok()
        };
        assert!(takes(&[first..=first + 3, first + 4..=last]));
        assert!(!takes(&[first..=first + 3, first + 3..=last]));
        assert!(!takes(&[first + 3..=last, first..=first + 3]));
        assert!(!takes(&[first..=last, first + 3..=first + 4]));
        assert!(!takes(&[first - 1..=first]) && !takes(&[last..=last + 1]));
        assert!(!takes(&[RangeInclusive::new(first + 1, first)]), "there are none");
        let registers = |numbers: &[u16], max_bytes| {
            let mut calls = Calls::default();
            let mut range = calls.range(first..=first + 1);
            let register = || {
                for number in numbers {
                    range.on(*number, max_bytes, |_| Box::pin(async { Ok(Bytes::new()) }));
                }
            };
            catch_unwind(AssertUnwindSafe(register)).is_ok()
        };
        assert!(registers(&[first, first + 1], MAX_OUTSIDE_BYTES));
        assert!(!registers(&[first, first], 1) && !registers(&[first + 2], 1));
        assert!(!registers(&[first], MAX_OUTSIDE_BYTES + 1));
    }
}
