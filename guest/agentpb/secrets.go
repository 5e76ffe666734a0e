package agentpb

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// The registers of the device that holds the VM's secrets. Package devices/secrets, the host's side, has the same
// values.
const (
	SecretsPort  = 0x640
	SecretsPorts = 16

	SecretsSelect = 0
	SecretsSeek   = 4
	SecretsData   = 8
	SecretsWiped  = 12

	// SecretsTable is what to select to read the table.
	SecretsTable = 0
)

// Bounds of the secrets of one VM.
const (
	MaxSecrets = 64
	// MaxSecretName and MaxSecret bound a name and a value, in bytes.
	MaxSecretName = 64
	MaxSecret     = 64 << 10
	// MaxSecretsTable bounds the table, in bytes.
	MaxSecretsTable = 2 + MaxSecrets*(secretEntry+MaxSecretName)

	secretEntry     = 19
	secretsVersion  = 1
	secretIsAwaited = ^uint32(0)
)

// SecretsDir is the directory in a guest where programs find its secrets.
const SecretsDir = "/run/secrets"

// SubsystemSecrets is the agent's own program that serves secrets as files.
const SubsystemSecrets = "secrets"

// ErrSecretsTable says that bytes are not a table of secrets.
var ErrSecretsTable = errors.New("not a table of secrets")

// Secret is an entry of the table.
type Secret struct {
	ID       uint32
	Size     uint32 // bytes; 0 if awaited
	Awaited  bool   // it has no value yet
	UID, GID uint32
	Mode     uint16 // permissions
	Name     string
}

// DecodeSecrets parses the table.
func DecodeSecrets(b []byte) ([]Secret, error) {
	if len(b) < 2 || b[0] != secretsVersion || b[1] > MaxSecrets {
		return nil, fmt.Errorf("%w: it begins with % x", ErrSecretsTable, b[:min(len(b), 2)])
	}
	out := make([]Secret, 0, b[1])
	n := int(b[1])
	b = b[2:]
	for range n {
		if len(b) < secretEntry || len(b) < secretEntry+int(b[18]) || b[18] == 0 || b[18] > MaxSecretName {
			return nil, fmt.Errorf("%w: it is cut off", ErrSecretsTable)
		}
		s := Secret{
			ID: binary.LittleEndian.Uint32(b), Size: binary.LittleEndian.Uint32(b[4:]),
			UID: binary.LittleEndian.Uint32(b[8:]), GID: binary.LittleEndian.Uint32(b[12:]),
			Mode: binary.LittleEndian.Uint16(b[16:]), Name: string(b[secretEntry:][:b[18]]),
		}
		if s.Size == secretIsAwaited {
			s.Size, s.Awaited = 0, true
		}
		if s.Size > MaxSecret {
			return nil, fmt.Errorf("%w: %s has %d bytes, at most %d", ErrSecretsTable, s.Name, s.Size, MaxSecret)
		}
		out = append(out, s)
		b = b[secretEntry+int(b[18]):]
	}
	if len(b) > 0 {
		return nil, fmt.Errorf("%w: %d bytes too many", ErrSecretsTable, len(b))
	}
	return out, nil
}
