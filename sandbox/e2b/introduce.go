package e2b

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/e2b/accounts"
	"github.com/drowse-vm/drowse/sandbox/e2b/templates"
)

// Files of a sandbox that say what it is to programs that no command of this wire started. They are in its memory: a
// boot loses them, and a clone has those of another sandbox.
const (
	introduceDir = templates.GuestDir
	// envsFile has the variables of the sandbox's creation as a JSON object. The code interpreter reads it.
	envsFile = introduceDir + "/envs.json"
)

// introduce tells a running sandbox what it is. Its commands hear it anyway, so that a failure is only reported.
func (s *Server) introduce(ctx context.Context, b *box) {
	if err := s.introduced(ctx, b); err != nil && ctx.Err() == nil {
		s.report("introduce", b.Name(), err)
	}
}

func (s *Server) introduced(ctx context.Context, b *box) error {
	c, err := b.Agent(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.Mkdir(ctx, introduceDir, 0, true); err != nil {
		return err
	}
	for name, text := range map[string]string{
		".E2B_SANDBOX": "true", ".E2B_SANDBOX_ID": b.Name(), ".E2B_TEMPLATE_ID": b.meta.E2B.Template,
	} {
		if err := c.WriteFile(ctx, introduceDir+"/"+name, strings.NewReader(text), guest.WriteOptions{Atomic: true}); err != nil {
			return err
		}
	}
	if len(b.meta.E2B.EnvVars) == 0 {
		if err := c.Remove(ctx, envsFile, false); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	}
	a, err := accounts.Read(ctx, c)
	if err != nil {
		return err
	}
	u, err := findUser(context.WithValue(ctx, keyBox, b), a)
	if err != nil {
		return err
	}
	data, err := json.Marshal(b.meta.E2B.EnvVars)
	if err != nil {
		return err
	}
	return c.WriteFile(ctx, envsFile, strings.NewReader(string(data)), guest.WriteOptions{Perm: 0o600, Owner: u.Owner(), Atomic: true})
}

// introduceAtOnce bounds the sandboxes of a fork that are told at once.
const introduceAtOnce = 8

// introduceAll is introduce for sandboxes by their names. It returns when all know.
func (s *Server) introduceAll(ctx context.Context, names []string) {
	var all errgroup.Group
	all.SetLimit(introduceAtOnce)
	for _, name := range names {
		all.Go(func() error {
			if b, err := s.find(name); err == nil {
				s.introduce(ctx, b)
			}
			return nil
		})
	}
	_ = all.Wait() // there is no error
}
