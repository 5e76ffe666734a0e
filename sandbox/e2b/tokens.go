package e2b

import (
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/drowse-vm/drowse/sandbox/state"
)

// What a token of a sandbox is for.
const (
	useEnvd    = "drowse e2b 1 envd"
	useTraffic = "drowse e2b 1 traffic"
)

// token returns a token of a sandbox. It is derived from the store's key and the id of the VM's record: it is stored
// nowhere, stays the same over sleeps, and no other sandbox has it, forks and copies included.
func token(s *state.Store, r *state.Record, use string) (string, error) {
	key, err := s.ProxyKey()
	if err != nil {
		return "", err
	}
	b, err := hkdf.Key(sha256.New, key, []byte(r.ID), use, sha256.Size)
	if err != nil {
		return "", fmt.Errorf("deriving a token of %s: %w", r.Spec.Name, err)
	}
	return hex.EncodeToString(b), nil
}

// same reports whether a shown secret is the wanted one, in a time that does not depend on where they differ.
func same(shown, want string) bool {
	return subtle.ConstantTimeCompare([]byte(shown), []byte(want)) == 1
}

// signature returns the signature by which a request for a file needs no token.
func signature(path, operation, user, token, expiry string) string {
	text := path + ":" + operation + ":" + user + ":" + token
	if expiry != "" {
		text += ":" + expiry
	}
	sum := sha256.Sum256([]byte(text))
	return "v1_" + base64.RawStdEncoding.EncodeToString(sum[:])
}

// signed reports whether a request for a file is signed for its operation with the sandbox's token.
func signed(r *http.Request, operation, want string, now time.Time) bool {
	q := r.URL.Query()
	for _, k := range []string{"path", "username", "signature", "signature_expiration"} {
		if len(q[k]) > 1 {
			return false // which of them was signed?
		}
	}
	expiry := q.Get("signature_expiration")
	if expiry != "" {
		at, err := strconv.ParseInt(expiry, 10, 64)
		if err != nil || now.Unix() > at {
			return false
		}
	}
	shown := q.Get("signature")
	return shown != "" && same(shown, signature(q.Get("path"), operation, q.Get("username"), want, expiry))
}

// expired reports whether a request shows a signature whose time is over. It may be wrong as well.
func expired(r *http.Request, now time.Time) bool {
	at, err := strconv.ParseInt(r.URL.Query().Get("signature_expiration"), 10, 64)
	return err == nil && now.Unix() > at
}
