package e2b

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/sandbox/e2b/accounts"
	"github.com/drowse-vm/drowse/sandbox/e2b/templates"
)

// defaultUser is who commands run as if a request chooses nobody and the guest has the user. Otherwise it is the
// user of the image, or root. A template may have another one, and another directory than the user's home.
const defaultUser = templates.DefaultUser

// text makes a guest's text what messages can carry: their strings are UTF-8.
func text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// findUser returns the user of a request.
func findUser(ctx context.Context, a accounts.Accounts) (accounts.Account, error) {
	name := userOf(ctx)
	b := boxOf(ctx)
	if name == "" {
		name = cmp.Or(b.meta.E2B.User, defaultUser)
		if _, ok := a.Find(name); !ok {
			cmd, err := b.Command(guest.Cmd{})
			if err != nil {
				return accounts.Account{}, err
			}
			if name, _, _ = strings.Cut(cmd.User, ":"); name == "" {
				name = "root"
			}
			if uid, err := strconv.Atoi(name); err == nil {
				name = a.User(uid)
			}
		}
	}
	u, ok := a.Find(name)
	if !ok {
		return u, connect.NewError(connect.CodeUnauthenticated, fmt.Errorf("the sandbox has no user %q", name))
	}
	u.Dir = b.meta.E2B.Workdir
	return u, nil
}

// pathOf returns the absolute path that a client means.
func pathOf(u accounts.Account, name string) (string, error) {
	out, err := u.Path(name)
	if err != nil {
		return "", connect.NewError(connect.CodeInvalidArgument, err)
	}
	return out, nil
}
