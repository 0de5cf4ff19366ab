"""What people read: findings, tables, the page, the paper's folder."""
