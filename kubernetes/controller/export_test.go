package controller

import (
	"context"
	"time"

	"github.com/drowse-vm/drowse/sandbox/api/client"
)

// Ask asks a node for nothing much.
func (f *Fleet) Ask(ctx context.Context, node, namespace string, limit time.Duration) error {
	return f.call(ctx, node, namespace, limit, func(ctx context.Context, c *client.Client) error {
		_, err := c.Version(ctx)
		return err
	})
}
