// Package sealed encrypts what a store of objects keeps: only who has its keys can read an object, or make one that
// others read. Object keys, sizes and times stay visible. The store can give back an earlier content of an object.
//
// An object is pieces of 4 KiB, so that a part of it can be read by itself. Each is
//
//	8 bytes    the id of the key: the first ones of SHA-256 of "drowse sealed object 1 key id", a zero byte, the key
//	1 byte     1 for the last piece of the object, else 0
//	2 bytes    how many bytes of the object it has; zeros follow these in an object that Put makes
//	12 bytes   the nonce: random for an object, with the number of the piece XORed into the last 4 bytes
//	           AES-256-GCM of the piece, with a tag of 16 bytes
//
// The AES key is HKDF-SHA-256 of the key, without salt; its info is "drowse sealed object 1", a zero byte and the
// object's key, so a piece is nowhere valid but in its object. What is authenticated besides are the number of the
// piece, in 8 bytes, and the 3 bytes above. Numbers are little-endian. The pieces of an object have one key and one
// random nonce: those of two contents that it had do not mix.
package sealed

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"

	"github.com/drowse-vm/drowse/sandbox/blob"
)

const (
	pieceSize  = 4 << 10
	keyIDSize  = 8
	usedAt     = keyIDSize + 1
	nonceAt    = usedAt + 2
	headerSize = nonceAt + 12
	overhead   = headerSize + 16
	sealedSize = pieceSize + overhead
	// format is that above.
	format = "drowse sealed object 1"
)

// MaxObject is the most bytes that an object may have.
const MaxObject = blob.MaxObject / sealedSize * pieceSize

// Store seals what it puts into another store. It implements blob.Store and blob.Sealer.
type Store struct {
	blob.Store
	keys *Keys
	key  *key // what is put is sealed under it
}

// New returns a store that has its objects in s, sealed under the host's own key.
func New(s blob.Store, k *Keys) *Store { return &Store{s, k, k.own} }

// SealFor implements blob.Sealer.
func (s *Store) SealFor(owner string) blob.Store {
	if k := s.keys.owners[owner]; k != nil {
		return &Store{s.Store, s.keys, k}
	}
	return New(s.Store, s.keys)
}

// Seal implements blob.Sealer.
func (s *Store) Seal() blob.Seal { return s.key.seal() }

func (k *key) seal() blob.Seal { return blob.Seal{Key: hex.EncodeToString(k.id[:]), Owner: k.owner} }

// aead returns what seals the pieces of an object.
func (k *key) aead(object string) (cipher.AEAD, error) {
	b, err := hkdf.Key(sha256.New, k.secret[:], nil, format+"\x00"+object, 32)
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(b)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

// data is what is authenticated besides a piece.
func data(n int64, header []byte) []byte {
	return append(binary.LittleEndian.AppendUint64(make([]byte, 0, 8+nonceAt-keyIDSize), uint64(n)), header[keyIDSize:nonceAt]...)
}

// nonce is that of an object or, by of, of a piece of it: of a piece's, of returns the object's.
type nonce [headerSize - nonceAt]byte

func (b nonce) of(n int64) nonce {
	last := b[len(b)-4:]
	binary.LittleEndian.PutUint32(last, binary.LittleEndian.Uint32(last)^uint32(n)) //nolint:gosec // MaxObject
	return b
}

func pieces(size int64) int64 { return max(1, (size+pieceSize-1)/pieceSize) }

// seal returns the pieces of an object. padded is for one that is read in parts: its last piece is as long as the
// others.
func (s *Store) seal(object string, body []byte, padded bool) ([]byte, error) {
	if len(body) > MaxObject {
		return nil, fmt.Errorf("%w: an object of %d bytes, and %d are allowed", blob.ErrKey, len(body), MaxObject)
	}
	aead, err := s.key.aead(object)
	if err != nil {
		return nil, fmt.Errorf("sealing %s: %w", object, err)
	}
	count := pieces(int64(len(body)))
	var base nonce
	if _, err := rand.Read(base[:]); err != nil {
		return nil, fmt.Errorf("sealing %s: %w", object, err)
	}
	out := make([]byte, 0, count*sealedSize)
	for n := range count {
		piece := body[n*pieceSize : min((n+1)*pieceSize, int64(len(body)))]
		at, last := len(out), byte(0)
		used := uint16(len(piece)) //nolint:gosec // at most pieceSize
		if n == count-1 {
			last = 1
			if padded {
				piece = append(make([]byte, 0, pieceSize), piece...)[:pieceSize]
			}
		}
		out = binary.LittleEndian.AppendUint16(append(append(out, s.key.id[:]...), last), used)
		of := base.of(n)
		out = append(out, of[:]...)
		header := out[at:]
		out = aead.Seal(out, header[nonceAt:], piece, data(n, header))
	}
	return out, nil
}

// open appends the plain bytes of an object's pieces to out: of those from the number first on, or of all of them. It
// also returns the key that they are sealed under.
func (s *Store) open(out []byte, object string, body []byte, first int64, all bool) ([]byte, *key, error) {
	broken := func(why string) ([]byte, *key, error) {
		return nil, nil, fmt.Errorf("%w: %.100s: %s", blob.ErrCorrupt, object, why)
	}
	var with *key
	var base nonce
	var aead cipher.AEAD
	for n := first; ; n++ {
		piece := body[:min(sealedSize, len(body))]
		if body = body[len(piece):]; len(piece) < overhead {
			return broken("it is not sealed, or cut")
		}
		k := s.keys.byID[[keyIDSize]byte(piece)]
		if k == nil {
			return nil, nil, fmt.Errorf("%w: %.100s: it is not sealed, or under the key %x: add that to the keys of this host", blob.ErrNoKey, object, piece[:keyIDSize])
		}
		var err error
		if with == nil {
			if aead, err = k.aead(object); err != nil {
				return nil, nil, fmt.Errorf("opening %s: %w", object, err)
			}
			with, base = k, nonce(piece[nonceAt:headerSize]).of(n)
		}
		if k != with || base != nonce(piece[nonceAt:headerSize]).of(n) {
			return broken("a piece of it is not of what was sealed with the others")
		}
		at := len(out)
		if out, err = aead.Open(out, piece[nonceAt:headerSize], piece[headerSize:], data(n, piece)); err != nil {
			return broken("it is not what was sealed")
		}
		used, last := int(binary.LittleEndian.Uint16(piece[usedAt:])), piece[keyIDSize] == 1
		if used > len(out)-at || !last && used != pieceSize {
			return broken("a piece of it has a wrong length")
		}
		out = out[:at+used]
		switch {
		case last && len(body) > 0:
			return broken("something follows it")
		case len(body) > 0:
		case all && !last:
			return broken("it is cut")
		default:
			return out, with, nil
		}
	}
}

// Put implements blob.Store.
func (s *Store) Put(ctx context.Context, object string, body []byte) error {
	b, err := s.seal(object, body, true)
	if err != nil {
		return err
	}
	return s.Store.Put(ctx, object, b)
}

// ReadAt implements blob.Store. It reads whole pieces.
func (s *Store) ReadAt(ctx context.Context, object string, p []byte, off int64) error {
	if err := blob.CheckRead(object, off); err != nil {
		return err
	}
	end := off + int64(len(p))
	if len(p) == 0 || end > MaxObject {
		err := s.Store.ReadAt(ctx, object, nil, 0) // it may be missing
		if err == nil && len(p) > 0 {
			err = io.ErrUnexpectedEOF
		}
		return err
	}
	first := off / pieceSize
	count := pieces(end - first*pieceSize)
	b := make([]byte, count*sealedSize)
	if err := s.Store.ReadAt(ctx, object, b, first*sealedSize); err != nil {
		return err
	}
	plain, _, err := s.open(make([]byte, 0, count*pieceSize), object, b, first, false)
	if err != nil {
		return err
	}
	if plain = plain[min(int64(len(plain)), off-first*pieceSize):]; len(plain) < len(p) {
		return io.ErrUnexpectedEOF
	}
	copy(p, plain)
	return nil
}

// Load implements blob.Store.
func (s *Store) Load(ctx context.Context, object string, limit int64) ([]byte, blob.Version, error) {
	body, v, _, err := s.LoadOf(ctx, object, limit)
	return body, v, err
}

// LoadOf implements blob.Sealer.
func (s *Store) LoadOf(ctx context.Context, object string, limit int64) (body []byte, v blob.Version, by blob.Seal, err error) {
	b, v, err := s.Store.Load(ctx, object, pieces(min(limit, MaxObject))*sealedSize)
	if err != nil {
		return nil, "", by, err
	}
	plain, k, err := s.open(make([]byte, 0, len(b)), object, b, 0, true)
	if err == nil && int64(len(plain)) > limit {
		err = fmt.Errorf("%w: %.100s has %d bytes, and %d are allowed", blob.ErrKey, object, len(plain), limit)
	}
	if err != nil {
		return nil, "", by, err
	}
	return plain, v, k.seal(), nil
}

// Swap implements blob.Store.
func (s *Store) Swap(ctx context.Context, object string, old blob.Version, body []byte) (blob.Version, error) {
	b, err := s.seal(object, body, false)
	if err != nil {
		return "", err
	}
	return s.Store.Swap(ctx, object, old, b)
}
