"""What is a framework's own: imported only when that framework's arrays come, or by the user."""
