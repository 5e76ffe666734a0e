package peer

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"time"
)

// Identity is what a host shows to others: a key that only this process has, and its name.
type Identity struct {
	host string
	cert tls.Certificate
	key  string
}

// NewIdentity makes an identity for a host.
func NewIdentity(host string) (*Identity, error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	// Nobody looks at more than the key and the name. TLS wants the rest.
	is := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: host}, NotAfter: time.Now().AddDate(100, 0, 0)}
	der, err := x509.CreateCertificate(rand.Reader, is, is, &private.PublicKey, private)
	if err != nil {
		return nil, fmt.Errorf("making the key of the host %s: %w", host, err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &Identity{host, tls.Certificate{Certificate: [][]byte{der}, PrivateKey: private, Leaf: leaf}, keyOf(leaf)}, nil
}

// Key returns the SHA-256 of the public key, in hex: ledger.Options.Key.
func (i *Identity) Key() string { return i.key }

// keyOf returns the SHA-256 of the public key of a certificate.
func keyOf(c *x509.Certificate) string {
	sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:])
}

// errKey means that another key was found at an address than the store names.
var errKey = errors.New("what answers there is another host, or an earlier process of this one")

// client is the TLS of a connection to the host with a key.
func (i *Identity) client(key, protocol string) *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{i.cert}, MinVersion: tls.VersionTLS13, NextProtos: []string{protocol},
		// Instead of by a chain, the key is judged by the store, in VerifyConnection.
		InsecureSkipVerify: true,
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 || keyOf(s.PeerCertificates[0]) != key {
				return errKey
			}
			return nil
		},
	}
}

// server is the TLS of connections from other hosts. Peers.admit judges the key: here, no possession is proven yet.
func (i *Identity) server() *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{i.cert}, MinVersion: tls.VersionTLS13, NextProtos: []string{"h2", "http/1.1"},
		ClientAuth: tls.RequireAnyClientCert, SessionTicketsDisabled: true,
	}
}

// wholeConn is a connection below TLS whose end is an error. crypto/tls takes an end between two records for the end of
// the stream, as if the other end had said so; but it may have died.
type wholeConn struct{ net.Conn }

var errCut = errors.New("the connection was cut")

// Read implements net.Conn.
func (c wholeConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if errors.Is(err, io.EOF) {
		err = errCut
	}
	return n, err
}

// wholeListener accepts such connections.
type wholeListener struct{ net.Listener }

// Accept implements net.Listener.
func (l wholeListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return wholeConn{c}, nil
}

// ErrListen means that an address cannot be one where other hosts reach this one.
var ErrListen = errors.New("other hosts cannot reach this one like that")

// Listen listens at the address where other hosts reach this one, and returns it: port 0 is any. It must be one of this
// host's, since others are told it.
func Listen(address string) (net.Listener, string, error) {
	host, _, err := net.SplitHostPort(address)
	if ip := net.ParseIP(host); err != nil || host == "" || ip != nil && ip.IsUnspecified() {
		return nil, "", fmt.Errorf("%w: address %q: use HOST:PORT, with a HOST that they can connect to", ErrListen, address)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, "", fmt.Errorf("%w: %w", ErrListen, err)
	}
	_, port, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		return nil, "", errors.Join(err, l.Close())
	}
	return l, net.JoinHostPort(host, port), nil
}
