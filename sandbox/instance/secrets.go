package instance

import (
	"context"
	"fmt"
	"time"

	"github.com/drowse-vm/drowse/devices/secrets"
	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/internal/wait"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// DeviceSecret returns a secret as the device knows it.
func DeviceSecret(f spec.SecretFile) secrets.Secret {
	if f.Mode == 0 {
		f.Mode = spec.DefaultSecretMode
	}
	return secrets.Secret{Name: f.Name, Mode: f.Mode, UID: f.UID, GID: f.GID}
}

// serveSecretsLimit is how long the agent may take to start serving secrets.
const serveSecretsLimit = 5 * time.Minute

// ServeSecrets makes the agent serve secrets and look for new ones.
func (in *Instance) ServeSecrets(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, serveSecretsLimit)
	defer cancel()
	return in.ask(ctx, func(ctx context.Context, c *guest.Client) error {
		if err := c.ServeSecrets(ctx); err != nil {
			return fmt.Errorf("%w: %w", spec.ErrSecrets, err)
		}
		return nil
	})
}

// awaitSecrets tells the guest which secrets will come.
func (in *Instance) awaitSecrets() error {
	for _, f := range in.parts.Secrets {
		if err := in.machine.Secrets().Await(DeviceSecret(f)); err != nil {
			return fmt.Errorf("%w: %w", spec.ErrSecrets, err)
		}
	}
	return nil
}

// The agent has a value in its buffer for some milliseconds at most. If a pause hits that moment, standStill lets
// the guest run on for secretPause and tries again. After secretLimit it gives up.
const (
	secretLimit = 20 * time.Second
	secretPause = 10 * time.Millisecond
)

// standStill has the agent stand by and pauses the machine at a moment when drowse has no copy of a secret in the
// guest. The caller must call release, also after an error. begin is when the pause began.
func (in *Instance) standStill(ctx context.Context, limit time.Duration) (release func(), begin time.Time, err error) {
	for deadline := time.Now().Add(limit); ; {
		release = in.standBy(ctx)
		begin = time.Now()
		if err := in.machine.Pause(ctx); err != nil || !in.machine.Secrets().Busy() {
			return release, begin, err
		}
		in.machine.Handover().Release()
		if err := in.machine.Resume(); err != nil {
			return release, begin, err
		}
		release()
		release = func() {}
		if time.Now().After(deadline) {
			return release, begin, fmt.Errorf("%w: the guest has read one, and does not say that its copy is wiped: take them away with Sandbox.RemoveSecrets", spec.ErrSecrets)
		}
		if wait.For(ctx, secretPause) != nil {
			return release, begin, ctx.Err()
		}
	}
}
