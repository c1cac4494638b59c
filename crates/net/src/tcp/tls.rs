//! TLS 1.3 with the nodes' own keys and no certificates (RFC 7250 raw public keys).
//!
//! Each side shows its Ed25519 key and signs the handshake with it; there is no
//! authority. The dialler accepts only the key it expects, the listener any key: who may
//! talk is decided by the proof that follows ([`crate::hello`]). No session tickets: a
//! connection lives long, and a resumed one would not prove the key again.

use std::sync::Arc;

use atoll_key::{PeerId, SecretKey};
use ed25519_dalek::{Signature, VerifyingKey};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::CryptoProvider;
use rustls::crypto::ring::{cipher_suite, default_provider, kx_group};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::{CertifiedKey, Signer, SigningKey};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error,
    PeerMisbehaved, ServerConfig, SignatureAlgorithm, SignatureScheme, SupportedCipherSuite,
};

/// What both sides must agree on by ALPN: names the form of the hello, not the version of
/// what follows it.
pub(super) const ALPN: &[u8] = b"atoll/2";
/// What precedes the 32 bytes of an Ed25519 key in a SubjectPublicKeyInfo (RFC 8410).
const SPKI_PREFIX: [u8; 12] =
    [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// TLS as one node speaks it.
pub(super) struct Tls {
    provider: Arc<CryptoProvider>,
    key: Arc<CertifiedKey>,
    server: Arc<ServerConfig>,
}

impl Tls {
    pub(super) fn new(secret: &SecretKey) -> Result<Tls, Error> {
        let provider = Arc::new(CryptoProvider {
            cipher_suites: cipher_suites(),
            kx_groups: vec![kx_group::X25519],
            ..default_provider()
        });
        let spki = [&SPKI_PREFIX[..], &secret.public()].concat();
        let signer = Arc::new(NodeKey(secret.clone()));
        let key = Arc::new(CertifiedKey::new(vec![CertificateDer::from(spki)], signer));
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(Arc::new(KeyVerifier { expected: None }))
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(key.clone())));
        server.alpn_protocols = vec![ALPN.to_vec()];
        server.send_tls13_tickets = 0;
        Ok(Tls { provider, key, server: Arc::new(server) })
    }

    /// How to accept any peer's key.
    pub(super) fn server(&self) -> Arc<ServerConfig> {
        self.server.clone()
    }

    /// The client configuration that accepts only the holder of `expected`.
    pub(super) fn client(&self, expected: PeerId) -> Result<Arc<ClientConfig>, Error> {
        let verifier = Arc::new(KeyVerifier { expected: Some(expected) });
        let mut client = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(
                self.key.clone(),
            )));
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.enable_sni = false;
        client.resumption = Resumption::disabled();
        Ok(Arc::new(client))
    }
}

/// AES first where the machine computes it, ChaCha20 first elsewhere.
fn cipher_suites() -> Vec<SupportedCipherSuite> {
    let mut suites = vec![
        cipher_suite::TLS13_AES_128_GCM_SHA256,
        cipher_suite::TLS13_AES_256_GCM_SHA384,
        cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    if !machine_has_aes() {
        suites.rotate_right(1);
    }
    suites
}

#[cfg(target_arch = "x86_64")]
fn machine_has_aes() -> bool {
    std::is_x86_feature_detected!("aes") && std::is_x86_feature_detected!("pclmulqdq")
}

#[cfg(target_arch = "aarch64")]
fn machine_has_aes() -> bool {
    std::arch::is_aarch64_feature_detected!("aes")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn machine_has_aes() -> bool {
    false
}

/// The key the other side has shown and, once the handshake is over, proven.
pub(super) fn peer_key(certificates: Option<&[CertificateDer<'_>]>) -> Option<PeerId> {
    match certificates {
        Some([only]) => key_in(only),
        _ => None,
    }
}

fn key_in(spki: &[u8]) -> Option<PeerId> {
    spki.strip_prefix(&SPKI_PREFIX)?.try_into().ok().map(PeerId)
}

/// Signs handshakes with the node's key.
#[derive(Clone, Debug)]
struct NodeKey(SecretKey);

impl SigningKey for NodeKey {
    fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        let known = offered.contains(&SignatureScheme::ED25519);
        known.then(|| Box::new(self.clone()) as Box<dyn Signer>)
    }

    fn public_key(&self) -> Option<SubjectPublicKeyInfoDer<'_>> {
        Some([&SPKI_PREFIX[..], &self.0.public()].concat().into())
    }

    fn algorithm(&self) -> SignatureAlgorithm {
        SignatureAlgorithm::ED25519
    }
}

impl Signer for NodeKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
        Ok(self.0.sign(message).to_vec())
    }

    fn scheme(&self) -> SignatureScheme {
        SignatureScheme::ED25519
    }
}

/// Accepts the expected Ed25519 key, or any.
#[derive(Debug)]
struct KeyVerifier {
    expected: Option<PeerId>,
}

impl KeyVerifier {
    fn check_key(&self, end_entity: &[u8], intermediates: usize) -> Result<(), Error> {
        let key = key_in(end_entity);
        let Some(key) = key.filter(|_| intermediates == 0) else {
            return Err(CertificateError::BadEncoding.into());
        };
        match self.expected {
            Some(expected) if expected != key => {
                Err(CertificateError::ApplicationVerificationFailure.into())
            }
            _ => Ok(()),
        }
    }

    /// Strict: weak keys and malleable signatures are refused.
    fn check_signature(
        message: &[u8],
        end_entity: &[u8],
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        if signed.scheme != SignatureScheme::ED25519 {
            return Err(PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into());
        }
        let key = key_in(end_entity).ok_or(CertificateError::BadEncoding)?;
        let key = VerifyingKey::from_bytes(&key.0).map_err(|_| CertificateError::BadEncoding)?;
        let signature = Signature::from_slice(signed.signature())
            .map_err(|_| CertificateError::BadSignature)?;
        key.verify_strict(message, &signature).map_err(|_| CertificateError::BadSignature)?;
        Ok(HandshakeSignatureValid::assertion())
    }
}

fn no_tls12() -> Error {
    PeerMisbehaved::SignedHandshakeWithUnadvertisedSigScheme.into()
}

impl ServerCertVerifier for KeyVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check_key(end_entity, intermediates.len())?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        KeyVerifier::check_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for KeyVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check_key(end_entity, intermediates.len())?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        KeyVerifier::check_signature(message, cert, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lone_ed25519_key_is_a_peer() {
        let secret = SecretKey::from_seed(&[1; 32]);
        let spki = CertificateDer::from([&SPKI_PREFIX[..], &secret.public()].concat());
        assert_eq!(peer_key(Some(std::slice::from_ref(&spki))), Some(secret.peer_id()));
        assert_eq!(peer_key(Some(&[spki.clone(), spki.clone()])), None);
        assert_eq!(peer_key(Some(&[])), None);
        assert_eq!(peer_key(None), None);
        let longer = CertificateDer::from([&spki[..], &[0]].concat());
        assert_eq!(peer_key(Some(&[longer])), None);
        let shorter = CertificateDer::from(spki[..43].to_vec());
        assert_eq!(peer_key(Some(&[shorter])), None);
    }

    #[test]
    fn only_the_expected_key_is_accepted_where_one_is_expected() {
        let [one, two] = [1, 2].map(|seed| SecretKey::from_seed(&[seed; 32]));
        let spki = [&SPKI_PREFIX[..], &one.public()].concat();
        assert!(KeyVerifier { expected: None }.check_key(&spki, 0).is_ok());
        assert!(KeyVerifier { expected: Some(one.peer_id()) }.check_key(&spki, 0).is_ok());
        assert!(KeyVerifier { expected: Some(two.peer_id()) }.check_key(&spki, 0).is_err());
        assert!(KeyVerifier { expected: None }.check_key(&spki, 1).is_err());
    }
}
