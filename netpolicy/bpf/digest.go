package bpf

import (
	"crypto/sha256"
	"encoding/hex"
)

// Digest identifies the compiled objects: two builds have the same digest if they have the same programs and maps.
func Digest() string {
	sum := sha256.Sum256(_EndpointBytes)
	return hex.EncodeToString(sum[:16])
}
